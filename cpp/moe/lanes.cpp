// Lanes: one counter per lane.
#include "moe/lanes.h"

#include "threads/topology.h"

#include <sched.h>

#include <algorithm>

namespace hybrid_moe {

void Lanes::cut(const std::vector<RowPart> & parts, int64_t row0, int64_t n_rows, int64_t rows_per_tile, int64_t n_repeats) {
    const RowPart whole = {row0, row0 + n_rows, 0};
    const RowPart * begin = parts.empty() ? &whole : parts.data();
    const RowPart * end = begin + (parts.empty() ? 1 : parts.size());
    n_lanes_ = 1;
    for (const RowPart * p = begin; p < end; p++) n_lanes_ = std::max(n_lanes_, std::min(p->node + 1, max_lanes));
    n_repeats_ = n_repeats;
    tiles_.clear();
    for (int i = 0; i < n_lanes_; i++) {
        Lane & lane = lanes_[i];
        lane.first = n_tiles();
        for (const RowPart * p = begin; p < end; p++) {
            if (std::max(p->node, 0) % max_lanes != i) continue;
            const int64_t last = std::min(p->row1, row0 + n_rows);
            for (int64_t r = std::max(p->row0, row0); r < last; r += rows_per_tile) {
                tiles_.push_back({r - row0, std::min(r + rows_per_tile, last) - row0});
            }
        }
        lane.n = n_tiles() - lane.first;
        lane.next.store(0, std::memory_order_relaxed);
    }
}

bool Lanes::take(int lane, int64_t & i_repeat, RowTile & tile) {
    for (int i = 0; i < n_lanes_; i++) {
        Lane & l = lanes_[(lane + i) % n_lanes_];
        const int64_t all = l.n * n_repeats_;
        if (l.next.load(std::memory_order_relaxed) >= all) continue;
        const int64_t taken = l.next.fetch_add(1, std::memory_order_relaxed);
        if (taken >= all) continue;
        i_repeat = taken / l.n;
        tile     = tiles_[size_t(l.first + taken % l.n)];
        return true;
    }
    return false;
}

bool Lanes::is_empty() const {
    for (int i = 0; i < n_lanes_; i++) {
        if (lanes_[i].next.load(std::memory_order_relaxed) < lanes_[i].n * n_repeats_) return false;
    }
    return true;
}

int node_here() { return machine().node_of(sched_getcpu()); }

}  // namespace hybrid_moe
