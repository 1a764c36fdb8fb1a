// The kernels' entry points, found by name through the driver API (cuda_device.cpp). What a thread does is in
// fp8_expand_body.h. A GPU of any generation runs them: no FP8, BF16 or F16 instruction is used.
#include "fp8_expand_body.h"

using namespace hybrid_moe;

extern "C" __global__ void __launch_bounds__(threads_per_block) hybrid_moe_fp8_to_bf16(const Fp8Job job) {
    expand_by_thread<HalfType::bf16>(job, uint64_t(blockIdx.x) * threads_per_block + threadIdx.x);
}

extern "C" __global__ void __launch_bounds__(threads_per_block) hybrid_moe_fp8_to_f16(const Fp8Job job) {
    expand_by_thread<HalfType::f16>(job, uint64_t(blockIdx.x) * threads_per_block + threadIdx.x);
}
