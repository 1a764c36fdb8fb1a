// The choice of an implementation, in baseline code.
#include "kernels.h"

#include <cstdio>
#include <cstring>

namespace hybrid_moe {

extern const Kernels kernels_scalar;
#if defined(__x86_64__)
extern const Kernels kernels_avx512_gfni;
extern const Kernels kernels_avx512_bf16;
extern const Kernels kernels_avx512_vbmi;
extern const Kernels kernels_avx512;
extern const Kernels kernels_avx2;
#endif

namespace {

#if defined(__x86_64__)
// __builtin_cpu_supports also asks whether the operating system saves the registers.
bool avx512_runs_here() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("f16c");
}
bool avx512_vbmi_runs_here() { return avx512_runs_here() && __builtin_cpu_supports("avx512vbmi"); }
bool avx512_bf16_runs_here() { return avx512_vbmi_runs_here() && __builtin_cpu_supports("avx512bf16"); }
bool avx512_gfni_runs_here() { return avx512_bf16_runs_here() && __builtin_cpu_supports("gfni"); }

bool avx2_runs_here() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#endif

bool always() { return true; }

#if defined(__x86_64__)
// Both BF16 loops run on both; the bit matrices win on Intel, the tables on AMD.
bool gfni_is_faster() { return avx512_gfni_runs_here() && __builtin_cpu_is("intel"); }
#endif

constexpr Implementation all[] = {
#if defined(__x86_64__)
    {&kernels_avx512_gfni, avx512_gfni_runs_here},
    {&kernels_avx512_bf16, avx512_bf16_runs_here},
    {&kernels_avx512_vbmi, avx512_vbmi_runs_here},
    {&kernels_avx512, avx512_runs_here},
    {&kernels_avx2, avx2_runs_here},
#endif
    {&kernels_scalar, always},
};

}  // namespace

// AVX2 tables: our speed over the better of stock ggml 0.25.3's layouts (plain, repacked) for a layer 7168x2048, top-8, one
// thread, processor time on a shared Zen 3, at 1 / 32 token rows: Q4_0 1.2 / 2.2, Q4_K 1.2 / 2.9, Q5_K 1.2 / 2.4, Q6_K
// 1.1 / 2.8, IQ4_XS 1.2 / 2.5, MXFP4 1.1 / 2.3, NVFP4 1.2 / 2.1, Q8_0 1.2 / 1.6; at 256 rows Q4_K 1.5, Q5_K 1.4, Q6_K 1.5,
// IQ4_XS 1.3, MXFP4 1.6. Re-measure with `hybrid-moe bench layer`. The scalar table decodes value by value and was not made
// to compete.
bool worth_taking(const Kernels & kernels, WeightType type) { return &kernels != &kernels_scalar || type < WeightType::q4_0; }

const Implementation * implementations(size_t * n) {
    *n = sizeof all / sizeof all[0];
    return all;
}

const Kernels * select_kernels(const char * forced, char * error, size_t error_size) {
    const bool any = !forced || !*forced;
    for (const Implementation & i : all) {
#if defined(__x86_64__)
        if (any && i.kernels == &kernels_avx512_gfni && !gfni_is_faster()) continue;
#endif
        if (any ? i.runs_here() : !strcmp(i.kernels->name, forced) && i.runs_here()) return i.kernels;
    }
    int n = snprintf(error, error_size, "HYBRID_MOE_ISA=%s is unknown or does not run on this CPU; choose one of:", forced);
    for (const Implementation & i : all) {
        if (i.runs_here() && n >= 0 && size_t(n) < error_size) {
            n += snprintf(error + n, error_size - size_t(n), " %s", i.kernels->name);
        }
    }
    return nullptr;
}

}  // namespace hybrid_moe
