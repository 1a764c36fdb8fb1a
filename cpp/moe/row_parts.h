// How the rows of expert matrices are divided between NUMA nodes. Places nothing.
#pragma once

#include <cstdint>
#include <vector>

namespace hybrid_moe {

struct RowPart {
    int64_t row0, row1;
    int     node;  // index into machine().nodes; -1: any
};

// Ascending, without gaps, [0, n_rows); nodes get rows in proportion to `weights` (their cores), cut at multiples of
// `cut_rows`. With several nodes, the two halves of the rows are divided alike: the matrix may hold gate above up, and row
// r of both is needed by one thread.
constexpr int64_t cut_rows = 32;
std::vector<RowPart> divide_rows(int64_t n_rows, const std::vector<int> & weights);

// By this machine's nodes that may hold memory.
std::vector<RowPart> divide_rows(int64_t n_rows);

}  // namespace hybrid_moe
