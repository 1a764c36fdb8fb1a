// Tiles of output rows in lanes, one lane per NUMA node: threads take the tiles whose weights lie on their node first, and
// then help with the others. Without a copy by nodes there is one lane.
#pragma once

#include "moe/row_parts.h"

#include <atomic>
#include <cstdint>
#include <vector>

namespace hybrid_moe {

struct RowTile {
    int64_t row0, row1;  // of the projection
};

class Lanes {
public:
    static constexpr int max_lanes = 16;  // nodes beyond share lanes

    // Cuts rows [row0, row0 + n_rows) of a matrix into tiles of rows_per_tile at most, none across a part's end. Each tile
    // is to be taken n_repeats times (once per expert). Begins anew. `parts` may be empty: all rows are alike.
    void cut(const std::vector<RowPart> & parts, int64_t row0, int64_t n_rows, int64_t rows_per_tile, int64_t n_repeats);

    int64_t n_tiles() const { return int64_t(tiles_.size()); }  // per repeat

    // Takes a tile, of `lane` (index of a node) or of the lane with the next higher number that has one; any thread may.
    // All tiles of a lane are taken for one repeat before any is for the next. False when there are none left.
    bool take(int lane, int64_t & i_repeat, RowTile & tile);

    bool is_empty() const;

    // More than one lane: only then does it matter which node a thread is on.
    bool has_nodes() const { return n_lanes_ > 1; }

private:
    struct Lane {
        alignas(64) std::atomic<int64_t> next{0};
        int64_t first = 0;    // of its tiles
        int64_t n     = 0;
    };

    std::vector<RowTile> tiles_;  // lane after lane
    Lane                 lanes_[max_lanes];
    int                  n_lanes_   = 1;
    int64_t              n_repeats_ = 0;
};

// Index of the node that the calling thread runs on now.
int node_here();

}  // namespace hybrid_moe
