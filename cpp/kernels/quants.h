// Block layouts of GGUF's quantised types, and the functions that read them. A block holds consecutive values of one row;
// 16-bit numbers are little-endian, d is F16. Nothing is aligned. Values of a block, i counting from 0:
//
//   Q8_0     32: d, int8 q[32]                      d x q[i]
//   Q4_0     32: d, q[16]                           d x (nibble - 8); low nibbles are values 0..15, high ones 16..31
//   MXFP4    32: e, q[16]                           2^(e - 127) x E2M1(nibble), nibbles as in Q4_0
//   NVFP4    64: s[4], q[32]                        per 16 values: E4M3 (unsigned) s x E2M1(nibble); 8 bytes of q each: low
//                                                   nibbles are values 0..7, high ones 8..15
//   Q4_K    256: d, dmin, s[12], q[128]             per 32 values: (d x scale) x nibble - dmin x min; 6-bit scales and mins,
//                                                   see KScales; per 64 values 32 bytes of q: low nibbles first
//   Q5_K    256: d, dmin, s[12], h[32], q[128]      as Q4_K with a fifth bit: bit i / 32 of h[i % 32]
//   Q6_K    256: l[128], h[64], int8 s[16], d       per 16 values: (d x s) x (6 bits - 32); per 128 values 64 bytes of l
//                                                   and 32 of h: value i has nibble i / 64 of l[i % 64] and bits
//                                                   2 (i / 32).. of h[i % 32]
//   IQ4_XS  256: d, u16 h, l[4], q[128]             per 32 values: d x (6 bits - 32) x iq4_values[nibble]; scale i / 32 has its
//                                                   nibble in l and bits 2 (i / 32).. of h; 16 bytes of q each, as in Q4_0
#pragma once

#include "kernels.h"

namespace hybrid_moe {

constexpr int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t e2m1_doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Bits of the float 2^(e - 128), half of an E8M0 scale, which goes with e2m1_doubled. e = 255, NaN in the format's
// definition, is 2^127 here as in ggml.
constexpr uint32_t half_e8m0_bits(uint32_t e) { return e < 2 ? 0x00200000u << e : (e - 1) << 23; }

// The 8 scales and 8 minimums of a Q4_K or Q5_K block, a byte each, out of its 12 bytes of 6-bit numbers: the low six bits
// of bytes 0..7 are scales and minimums 0..3; nibbles of bytes 8..11 are the low bits of scales and minimums 4..7,
// whose high bits are the top two of bytes 0..7.
struct KScales {
    uint64_t scales;
    uint64_t mins;

    explicit KScales(const uint8_t * p) {
        uint32_t a, b, c;
        __builtin_memcpy(&a, p, 4);
        __builtin_memcpy(&b, p + 4, 4);
        __builtin_memcpy(&c, p + 8, 4);
        const uint32_t high_scales = (c & 0x0F0F0F0Fu) | (a >> 2 & 0x30303030u);
        const uint32_t high_mins   = (c >> 4 & 0x0F0F0F0Fu) | (b >> 2 & 0x30303030u);
        scales = uint64_t(high_scales) << 32 | (a & 0x3F3F3F3Fu);
        mins   = uint64_t(high_mins) << 32 | (b & 0x3F3F3F3Fu);
    }
    float scale(int i) const { return float(scales >> (8 * i) & 63); }
    float min(int i) const { return float(mins >> (8 * i) & 63); }
};

// Types whose Kernels::dot is multiply_quants_*: all with blocks.
constexpr bool is_quantised(WeightType type) { return type == WeightType::q8_0 || type >= WeightType::q4_0; }

// multiply_*: as Kernels::dot, for any number of token rows of a quantised type. expand_*: as Kernels::expand.
//
// scalar: floats throughout.
void multiply_quants_scalar(const ExpertMatrix & e, int64_t row0, int64_t row1, const TokenRows & t);
void expand_quants_scalar(const ExpertMatrix & e, int64_t i_row, int64_t i0, int64_t n, float * out);

// avx2: activations are rounded to int8 as ggml's CPU back end rounds them for the type (blocks of 32 with an F16 scale,
// or of 256 with a float scale for the 256-value types), integer sums are exact, and floats are added per block. Token
// rows with NaN, infinity or a magnitude of 2^22 or more are multiplied as floats instead.
void multiply_quants_avx2(const ExpertMatrix & e, int64_t row0, int64_t row1, const TokenRows & t);
void expand_quants_avx2(const ExpertMatrix & e, int64_t i_row, int64_t i0, int64_t n, float * out);

}  // namespace hybrid_moe
