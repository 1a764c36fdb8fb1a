// Products of 256 quantised weights and int8 activations on AVX2, one struct per weight type: eight blocks of 32, four of 64 or
// one of 256. Integer sums are exact. The loops over rows are in quants_avx2.cpp.
#pragma once

#include "quants_x_avx2.h"

namespace hybrid_moe {
namespace {

inline __m256 to_floats(__m256i v) { return _mm256_cvtepi32_ps(v); }

// Unsigned times signed bytes, two products per 16-bit sum. 31 x 127 x 2 and even 128 x 127 x 2 do not overflow.
inline __m256i products(__m256i bytes, const int8_t * x) { return _mm256_maddubs_epi16(bytes, load32(x)); }

// Signed times signed: the sign moves to the activations. -128 becomes 128, unsigned.
inline __m256i signed_products(__m256i magnitude, __m256i bytes, const int8_t * x) {
    return _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(load32(x), bytes));
}

// sum += v, here and now: left alone, GCC computes all products of a step first and keeps them in memory until it adds them.
inline void add_to(__m256i & sum, __m256i v) {
    sum = _mm256_add_epi32(sum, v);
    asm("" : "+x"(sum));
}

// The same pointer, to be kept in a register: GCC would otherwise compute the address of every element before the loop.
inline const float * one_base(const float * p) {
    asm("" : "+r"(p));
    return p;
}

inline __m256i pairs(__m256i products) { return _mm256_madd_epi16(products, _mm256_set1_epi16(1)); }

// A weight type: the bytes of 256 columns (step_bytes), the activations it meets (X), and
//   multiply<M>(w, x, acc): adds the products of 256 columns to acc[M * chains<M>], chains of eight lanes per token row;
//   x: the M token rows' activations of these columns.

// With few token rows one chain each would not hide the latency of the multiply-add.
template <int M> constexpr int chains = M <= 4 ? 2 : 1;

// Types with blocks of 32 and a scale each. Q gives Stride, scales(w), and per block: codes and how they are multiplied.
template <class Q> struct By32 {
    using X = Blocks32;
    static constexpr int block_len  = 32;
    static constexpr int step_bytes = 8 * Q::stride;

    template <int M> static void multiply(const uint8_t * w, const X * x, __m256 * acc) {
        constexpr int C = chains<M>;
        const __m256 d = Q::scales(w);
        alignas(32) float scales[8 * M];
        for (int j = 0; j < M; j++) {
            const __m256 both = _mm256_mul_ps(d, _mm256_load_ps(x[j].d));
            _mm256_store_ps(scales + 8 * j, both);
            if (Q::offset) acc[C * j] = _mm256_fmadd_ps(both, _mm256_mul_ps(_mm256_load_ps(x[j].sum), _mm256_set1_ps(-Q::offset)), acc[C * j]);
        }
        const float * scale = one_base(scales);
#pragma GCC unroll 8
        for (int b = 0; b < 8; b++) {
            const typename Q::Codes codes = Q::decode(w + b * Q::stride);
            for (int j = 0; j < M; j++) {
                const __m256 sum = to_floats(pairs(Q::times(codes, x[j].q + 32 * b)));
                acc[C * j + b % C] = _mm256_fmadd_ps(sum, _mm256_broadcast_ss(scale + 8 * j + b), acc[C * j + b % C]);
            }
        }
    }
};

// Codes from 0 on: value = code - offset.
struct Unsigned {
    using Codes = __m256i;
    static __m256i times(__m256i codes, const int8_t * x) { return products(codes, x); }
};

struct Q4_0 : Unsigned {
    static constexpr int   stride = 18;
    static constexpr float offset = 8.0f;
    static __m256 scales(const uint8_t * w) { return f16_of_blocks<stride>(w); }
    static __m256i decode(const uint8_t * p) { return nibbles(p + 2); }
};

constexpr int8_t e2m1_plus_12[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

struct Mxfp4 : Unsigned {
    static constexpr int   stride = 17;
    static constexpr float offset = 12.0f;
    static __m256 scales(const uint8_t * w) { return half_e8m0(bytes_of_blocks<stride>(w)); }
    static __m256i decode(const uint8_t * p) { return look_up(e2m1_plus_12, nibbles(p + 1)); }
};

struct Q8_0 {
    static constexpr int   stride = 34;
    static constexpr float offset = 0.0f;
    struct Codes { __m256i q, magnitude; };
    static __m256 scales(const uint8_t * w) { return f16_of_blocks<stride>(w); }
    static Codes decode(const uint8_t * p) {
        const __m256i q = load32(p + 2);
        return {q, _mm256_abs_epi8(q)};
    }
    static __m256i times(Codes c, const int8_t * x) { return signed_products(c.magnitude, c.q, x); }
};

struct Nvfp4 {
    using X = Blocks32Swapped;
    static constexpr int block_len  = 64;
    static constexpr int step_bytes = 4 * 36;

    template <int M> static void multiply(const uint8_t * w, const X * x, __m256 * acc) {
        constexpr int C = chains<M>;
        // Per 32 columns four floats: the scale of the first sixteen twice, that of the others twice.
        alignas(32) float scales[32];
        for (int i = 0; i < 2; i++) {
            const __m256 s = half_ue4m3(w + 72 * i, w + 72 * i + 36);
            _mm256_store_ps(scales + 16 * i, _mm256_unpacklo_ps(s, s));
            _mm256_store_ps(scales + 16 * i + 8, _mm256_unpackhi_ps(s, s));
        }
        const float * scale = one_base(scales);
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            constexpr int place[4] = {0, 2, 1, 3};  // unpacking works inside the halves
            const __m128 four = _mm_load_ps(scale + 16 * (g / 4) + 4 * place[g % 4]);
            const __m256 both_halves = _mm256_broadcast_ps(&four);
            const __m256i codes = look_up(e2m1_doubled, nibbles(w + g / 2 * 36 + 4 + g % 2 * 16));
            const __m256i magnitude = _mm256_abs_epi8(codes);
            for (int j = 0; j < M; j++) {
                const __m256 sum = to_floats(pairs(signed_products(magnitude, codes, x[j].q + 32 * g)));
                const __m256 both = _mm256_mul_ps(both_halves, _mm256_broadcast_ss(&x[j].d[g]));
                acc[C * j + g % C] = _mm256_fmadd_ps(sum, both, acc[C * j + g % C]);
            }
        }
    }
};

// Scales of sub-blocks as factors of madd: each one twice in a dword, to be broadcast from memory.
struct PairScales {
    alignas(32) uint32_t of[8];
    explicit PairScales(__m256i dwords) { _mm256_store_si256(reinterpret_cast<__m256i *>(of), dwords); }
    __m256i at(int i) const { return _mm256_set1_epi32(int32_t(of[i])); }
};

inline __m256i twice(__m256i dwords) { return _mm256_or_si256(dwords, _mm256_slli_epi32(dwords, 16)); }

// Q4_K, and Q5_K with its fifth bits.
template <bool Fifth> struct K45 {
    using X = Blocks256;
    static constexpr int block_len  = 256;
    static constexpr int step_bytes = Fifth ? 176 : 144;

    template <int M> static void multiply(const uint8_t * w, const X * x, __m256 * acc) {
        constexpr int C = chains<M>;
        const KScales s(w + 4);
        const PairScales scales(twice(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(s.scales)))));
        const __m128i mins = _mm_cvtepu8_epi16(_mm_cvtsi64_si128(int64_t(s.mins)));
        const uint8_t * codes = w + step_bytes - 128;
        const __m256i fifth = Fifth ? load32(w + 16) : _mm256_setzero_si256();
        const __m256i bit = _mm256_set1_epi8(16);
        __m256i sum[M];
        for (int j = 0; j < M; j++) sum[j] = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m256i q = load32(codes + 32 * i);
            __m256i low  = low_nibbles(q);
            __m256i high = high_nibbles(q);
            if (Fifth) {  // see quants_expand_avx2.cpp
                low  = _mm256_or_si256(low, _mm256_and_si256(_mm256_slli_epi16(_mm256_srli_epi16(fifth, 2 * i), 4), bit));
                high = _mm256_or_si256(high, _mm256_and_si256(_mm256_slli_epi16(_mm256_srli_epi16(fifth, 2 * i + 1), 4), bit));
            }
            for (int j = 0; j < M; j++) {
                const __m256i a = _mm256_madd_epi16(products(low, x[j].q + 64 * i), scales.at(2 * i));
                const __m256i b = _mm256_madd_epi16(products(high, x[j].q + 64 * i + 32), scales.at(2 * i + 1));
                add_to(sum[j], a);
                add_to(sum[j], b);
            }
        }
        const __m256 d    = _mm256_set1_ps(f16_at(w));
        const __m256 dmin = _mm256_set1_ps(-f16_at(w + 2));
        for (int j = 0; j < M; j++) {
            const __m256 dx = _mm256_broadcast_ss(&x[j].d);
            const __m128i less = _mm_madd_epi16(mins, _mm_load_si128(reinterpret_cast<const __m128i *>(x[j].sum32)));
            acc[C * j] = _mm256_fmadd_ps(to_floats(sum[j]), _mm256_mul_ps(d, dx), acc[C * j]);
            acc[C * j + C - 1] = _mm256_fmadd_ps(to_floats(_mm256_zextsi128_si256(less)), _mm256_mul_ps(dmin, dx), acc[C * j + C - 1]);
        }
    }
};

struct Q6_k {
    using X = Blocks256;
    static constexpr int block_len  = 256;
    static constexpr int step_bytes = 210;

    template <int M> static void multiply(const uint8_t * w, const X * x, __m256 * acc) {
        constexpr int C = chains<M>;
        const __m128i scale_bytes = load16(w + 192);
        const __m256i scales = _mm256_cvtepi8_epi16(scale_bytes);
        const __m256i two_bits = _mm256_set1_epi8(0x30);
        __m256i sum[M];
        // What the offset of 32 adds: 32 x scale x sum of sixteen activations.
        for (int j = 0; j < M; j++) {
            const __m256i sums = _mm256_load_si256(reinterpret_cast<const __m256i *>(x[j].sum16));
            sum[j] = _mm256_slli_epi32(_mm256_sub_epi32(_mm256_setzero_si256(), _mm256_madd_epi16(scales, sums)), 5);
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const __m256i l0 = load32(w + 64 * half);
            const __m256i l1 = load32(w + 64 * half + 32);
            const __m256i h  = load32(w + 128 + 32 * half);
            const __m256i q[4] = {
                _mm256_or_si256(low_nibbles(l0), _mm256_and_si256(_mm256_slli_epi16(h, 4), two_bits)),
                _mm256_or_si256(low_nibbles(l1), _mm256_and_si256(_mm256_slli_epi16(h, 2), two_bits)),
                _mm256_or_si256(high_nibbles(l0), _mm256_and_si256(h, two_bits)),
                _mm256_or_si256(high_nibbles(l1), _mm256_and_si256(_mm256_srli_epi16(h, 2), two_bits)),
            };
            // Two scales per 32 columns, in the halves of a register: bytes 2i and 2i + 1 spread to eight words each.
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const __m256i pick = _mm256_set_m128i(_mm_set1_epi8(char(8 * half + 2 * i + 1)), _mm_set1_epi8(char(8 * half + 2 * i)));
                const __m256i scale = _mm256_srai_epi16(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(scale_bytes), pick), 8);
                for (int j = 0; j < M; j++) {
                    const __m256i p = products(q[i], x[j].q + 128 * half + 32 * i);
                    add_to(sum[j], _mm256_madd_epi16(p, scale));
                }
            }
        }
        const __m256 d = _mm256_set1_ps(f16_at(w + 208));
        for (int j = 0; j < M; j++) {
            acc[C * j] = _mm256_fmadd_ps(to_floats(sum[j]), _mm256_mul_ps(d, _mm256_broadcast_ss(&x[j].d)), acc[C * j]);
        }
    }
};

struct Iq4_xs {
    using X = Blocks256;
    static constexpr int block_len  = 256;
    static constexpr int step_bytes = 136;

    template <int M> static void multiply(const uint8_t * w, const X * x, __m256 * acc) {
        constexpr int C = chains<M>;
        const PairScales scales(twice(_mm256_cvtepu16_epi32(iq4_xs_scales(w))));
        __m256i sum[M];
        for (int j = 0; j < M; j++) sum[j] = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const __m256i codes = look_up(iq4_values, nibbles(w + 8 + 16 * i));
            const __m256i magnitude = _mm256_abs_epi8(codes);
            for (int j = 0; j < M; j++) {
                const __m256i p = signed_products(magnitude, codes, x[j].q + 32 * i);
                add_to(sum[j], _mm256_madd_epi16(p, scales.at(i)));
            }
        }
        const __m256 d = _mm256_set1_ps(f16_at(w));
        for (int j = 0; j < M; j++) {
            acc[C * j] = _mm256_fmadd_ps(to_floats(sum[j]), _mm256_mul_ps(d, _mm256_broadcast_ss(&x[j].d)), acc[C * j]);
        }
    }
};

}  // namespace
}  // namespace hybrid_moe
