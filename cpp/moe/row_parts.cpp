// divide_rows.
#include "moe/row_parts.h"

#include "threads/topology.h"

namespace hybrid_moe {
namespace {

void divide(int64_t begin, int64_t end, const std::vector<int> & weights, std::vector<RowPart> & out) {
    int64_t all = 0;
    for (int w : weights) all += w;
    int64_t sum = 0;
    int64_t row0 = begin;
    for (size_t i = 0; i < weights.size(); i++) {
        sum += weights[i];
        int64_t row1 = begin + (end - begin) * sum / all / cut_rows * cut_rows;
        if (i + 1 == weights.size()) row1 = end;
        if (row1 > row0) out.push_back({row0, row1, int(i)});
        row0 = row1 > row0 ? row1 : row0;
    }
}

}  // namespace

std::vector<RowPart> divide_rows(int64_t n_rows, const std::vector<int> & weights) {
    if (weights.size() < 2) return {{0, n_rows, weights.empty() ? -1 : 0}};
    std::vector<RowPart> parts;
    divide(0, n_rows / 2, weights, parts);
    divide(n_rows / 2, n_rows, weights, parts);
    return parts;
}

std::vector<RowPart> divide_rows(int64_t n_rows) {
    const std::vector<Node> & nodes = machine().nodes;
    std::vector<int> weights, index;
    for (size_t i = 0; i < nodes.size(); i++) {
        if (!nodes[i].may_hold) continue;
        weights.push_back(nodes[i].n_cores);
        index.push_back(int(i));
    }
    std::vector<RowPart> parts = divide_rows(n_rows, weights);
    for (RowPart & part : parts) {
        if (part.node >= 0) part.node = index[size_t(part.node)];
    }
    return parts;
}

}  // namespace hybrid_moe
