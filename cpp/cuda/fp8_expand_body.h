// FP8 to BF16 or F16 as one GPU thread does it: the arithmetic and the indices. Compiled by nvcc for the device and by the
// host's compiler for tests, which run the grid in a loop. No CUDA names here.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define HYBRID_MOE_ON_BOTH __host__ __device__ __forceinline__
#define HYBRID_MOE_NOT_UNROLLED _Pragma("unroll 1")
#else
#define HYBRID_MOE_ON_BOTH inline
#define HYBRID_MOE_NOT_UNROLLED
#endif

namespace hybrid_moe {

enum class HalfType : int { bf16 = 0, f16 = 1 };

// The kernels' names in fp8_expand.cu.
constexpr const char * entry_point(HalfType type) {
    return type == HalfType::bf16 ? "hybrid_moe_fp8_to_bf16" : "hybrid_moe_fp8_to_f16";
}

// The kernel's only parameter: made by the host's compiler, read by nvcc's code, so its members are all 8 bytes wide.
struct Fp8Job {
    const uint8_t * codes;       // [n_rows][k] E4M3FN
    const float *   scale;       // [ceil(n_rows / block_rows)][n_k_blocks]
    uint16_t *      out;         // [n_rows][k]
    uint64_t        n_rows;
    uint64_t        k;
    uint64_t        block_rows;  // rows per scale; the last block may be partial
    uint64_t        block_k;     // columns per scale, at most k; the last block may be partial
    uint64_t        n_k_blocks;  // ceil(k / block_k)
};
static_assert(sizeof(Fp8Job) == 64, "host and device agree on the layout");

// One 16-byte load and two 16-byte stores per thread.
constexpr uint32_t codes_per_thread  = 16;
constexpr uint32_t threads_per_block = 256;

HYBRID_MOE_ON_BOTH uint64_t blocks_of_grid(const Fp8Job & job) {
    const uint64_t per_block = uint64_t(codes_per_thread) * threads_per_block;
    return (job.n_rows * job.k + per_block - 1) / per_block;
}

HYBRID_MOE_ON_BOTH uint32_t bits_of(float f) {
    uint32_t bits;
    __builtin_memcpy(&bits, &f, sizeof bits);
    return bits;
}

HYBRID_MOE_ON_BOTH float float_of(uint32_t bits) {
    float f;
    __builtin_memcpy(&f, &bits, sizeof f);
    return f;
}

// code x scale, rounded to float. The code's seven low bits, taken as a float's exponent and mantissa, are its value x 2^-120,
// subnormals included; the factor 2^120 is exact, so there is one rounding. NaN codes are NaN, as in the CPU kernels.
HYBRID_MOE_ON_BOTH float fp8_times_scale(uint32_t code, float scale) {
    const float value = float_of((code & 0x7F) << 20 | (code & 0x80) << 24) * 0x1p120f;
    return (code & 0x7F) == 0x7F ? float_of(0x7FC00000) : value * scale;
}

// Round to nearest, ties to even, by integers. NaN becomes the quiet NaN without sign: adding to its mantissa could carry
// into infinity. Choices are written as values, not branches: threads of a warp stay together.
HYBRID_MOE_ON_BOTH uint32_t bf16_bits_of(float f) {
    const uint32_t bits = bits_of(f);
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded;
}

HYBRID_MOE_ON_BOTH uint32_t f16_bits_of(float f) {
    const uint32_t magnitude = bits_of(f) & 0x7FFFFFFF;
    const uint32_t sign = bits_of(f) >> 16 & 0x8000;
    // Below 2^-14 an F16 is a multiple of 2^-24, and so is a float from 0.5 to 1: the addition rounds.
    const uint32_t small  = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000;
    const uint32_t normal = ((magnitude + 0xFFF + (magnitude >> 13 & 1)) >> 13) - (112 << 10);
    const uint32_t finite = magnitude < 0x38800000 ? small : normal;
    const uint32_t half   = magnitude >= 0x477FF000 ? 0x7C00 : finite;  // from 65520 on: infinity
    return magnitude > 0x7F800000 ? 0x7E00 : sign | half;
}

// Rounded twice, to float and then to T: what dequantising in float32 and storing as T gives, bit for bit.
template <HalfType T> HYBRID_MOE_ON_BOTH uint32_t half_bits_of(uint32_t code, float scale) {
    const float value = fp8_times_scale(code, scale);
    return T == HalfType::bf16 ? bf16_bits_of(value) : f16_bits_of(value);
}

struct alignas(16) SixteenBytes { uint32_t word[4]; };

// nvcc 13.0 needs the cast to void pointers before __builtin_assume_aligned.
HYBRID_MOE_ON_BOTH SixteenBytes load_aligned(const void * p) {
    SixteenBytes bytes;
    __builtin_memcpy(&bytes, __builtin_assume_aligned(p, 16), sizeof bytes);
    return bytes;
}

HYBRID_MOE_ON_BOTH void store_aligned(const SixteenBytes & bytes, void * p) {
    __builtin_memcpy(__builtin_assume_aligned(p, 16), &bytes, sizeof bytes);
}

// 16 codes of one scale; both pointers are multiples of 16.
template <HalfType T> HYBRID_MOE_ON_BOTH void expand_sixteen(const uint8_t * codes, float scale, uint16_t * out) {
    const SixteenBytes in = load_aligned(codes);
    SixteenBytes halves[2];
    for (uint32_t i = 0; i < 8; i++) {
        const uint32_t two = in.word[i / 2] >> (i % 2 * 16);
        halves[i / 4].word[i % 4] = half_bits_of<T>(two & 0xFF, scale) | half_bits_of<T>(two >> 8 & 0xFF, scale) << 16;
    }
    store_aligned(halves[0], out);
    store_aligned(halves[1], out + 8);
}

HYBRID_MOE_ON_BOTH uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

// Thread i_thread of the grid: 16 codes of the matrix seen as one line, so that their alignment is that of the matrix whatever
// k is. They go in runs that share a row and a scale; nearly always that is one run. GPUs divide 64-bit numbers in software, at
// several times the cost of 32-bit ones: nvcc takes 32 bits where both numbers have no more.
template <HalfType T> HYBRID_MOE_ON_BOTH void expand_by_thread(const Fp8Job & job, uint64_t i_thread) {
    const uint64_t n = job.n_rows * job.k;
    uint64_t i = i_thread * codes_per_thread;
    const uint64_t end = smaller(i + codes_per_thread, n);
    const bool aligned = ((uintptr_t(job.codes) | uintptr_t(job.out)) & 15) == 0;
    uint64_t row = i / job.k;
    uint64_t column = i - row * job.k;
    while (i < end) {
        const uint64_t k_block = column / job.block_k;
        const uint64_t run = smaller(smaller(end - i, job.k - column), (k_block + 1) * job.block_k - column);
        const float scale = job.scale[row / job.block_rows * job.n_k_blocks + k_block];
        if (aligned && run == codes_per_thread) {
            expand_sixteen<T>(job.codes + i, scale, job.out + i);
        } else {
            HYBRID_MOE_NOT_UNROLLED
            for (uint64_t j = i; j < i + run; j++) job.out[j] = uint16_t(half_bits_of<T>(job.codes[j], scale));
        }
        i += run;
        column += run;
        if (column == job.k) {
            column = 0;
            row++;
        }
    }
}

}  // namespace hybrid_moe
