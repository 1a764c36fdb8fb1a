// Which token rows meet which expert: (token, slot) pairs sorted by expert. No weights, no arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hybrid_moe {

// Up to so many tokens are a step of generation, which takes milliseconds and gives its place to nobody (Turn): two that
// alternate, one on a GPU while the other is here, would lose that if they cut each other's layers into slices. Longer batches
// are prompts, behind which a token must not wait.
constexpr int64_t uninterrupted_tokens = 16;

// The router's choice: int32 [n_tokens][n_used], strides in bytes.
struct ExpertIds {
    const uint8_t * data;
    int64_t         token_stride;
    int64_t         slot_stride;
    int64_t         n_tokens;
    int64_t         n_used;

    int32_t at(int64_t token, int64_t slot) const {
        int32_t id;
        __builtin_memcpy(&id, data + token * token_stride + slot * slot_stride, sizeof id);
        return id;
    }
};

struct Pair {
    int32_t token;
    int32_t slot;
};

// Expert i owns pairs [begin[i], begin[i + 1]), in the order of tokens and slots.
struct Routing {
    std::vector<int64_t> begin;   // [n_expert + 1]
    std::vector<int64_t> active;  // experts with at least one pair, ascending
    std::vector<Pair>    pairs;   // [n_tokens x n_used]

    int64_t n_rows(int64_t i_expert) const { return begin[std::size_t(i_expert) + 1] - begin[std::size_t(i_expert)]; }
};

// Counting sort. False when an id is not in [0, n_expert): `bad` is that pair then.
bool group_by_expert(const ExpertIds & ids, int64_t n_expert, Routing & out, Pair & bad);

// Drops the pairs of all experts that are not in `keep` ([n_expert], non-zero: keep).
void keep_experts(Routing & route, const std::vector<char> & keep);

}  // namespace hybrid_moe
