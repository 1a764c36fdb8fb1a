// Facts about the weight types. Sizes are ggml's (GGUF specification).
#include "kernels.h"

namespace hybrid_moe {
namespace {

struct TypeFacts {
    const char * name;
    int64_t group_len;
    size_t  group_bytes;
    int64_t gemm_min_rows;
};

// Sums of int8 products beat expanded floats at any number of token rows where expanding is dear or the integers stay
// integers over 256 columns; else only while few token rows share the expansion (measured on Zen 3, docs/kernels.md).
constexpr int64_t never = INT64_MAX;

constexpr TypeFacts facts[n_weight_types] = {
    {"F32", 1, 4, 5}, {"F16", 1, 2, 4}, {"BF16", 1, 2, 4}, {"Q8_0", 32, 34, 16}, {"FP8 E4M3", 1, 1, 5},
    {"Q4_0", 32, 18, never}, {"Q4_K", 256, 144, never}, {"Q5_K", 256, 176, never}, {"Q6_K", 256, 210, never},
    {"IQ4_XS", 256, 136, never}, {"MXFP4", 32, 17, 64}, {"NVFP4", 64, 36, 16},
};

}  // namespace

const char * name_of(WeightType type) { return type == WeightType::foreign ? "another type" : facts[int(type)].name; }
int64_t group_len(WeightType type) { return facts[int(type)].group_len; }
size_t group_bytes(WeightType type) { return facts[int(type)].group_bytes; }
int64_t gemm_min_rows(WeightType type) { return facts[int(type)].gemm_min_rows; }


}  // namespace hybrid_moe
