// Quantised blocks to floats on AVX2, for the products of many token rows. Values as in quants.cpp, bit by bit.
#include "quants_avx2.h"

namespace hybrid_moe {
namespace {

// Eight signed bytes to floats.
inline __m256 floats8(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }

// 32 signed bytes times a scale; a second one for the upper half.
inline void store32(__m256i bytes, __m256 low, __m256 high, float * out) {
    const __m128i a = _mm256_castsi256_si128(bytes);
    const __m128i b = _mm256_extracti128_si256(bytes, 1);
    _mm256_storeu_ps(out, _mm256_mul_ps(floats8(a), low));
    _mm256_storeu_ps(out + 8, _mm256_mul_ps(floats8(_mm_srli_si128(a, 8)), low));
    _mm256_storeu_ps(out + 16, _mm256_mul_ps(floats8(b), high));
    _mm256_storeu_ps(out + 24, _mm256_mul_ps(floats8(_mm_srli_si128(b, 8)), high));
}

inline void store32(__m256i bytes, float scale, float * out) {
    const __m256 s = _mm256_set1_ps(scale);
    store32(bytes, s, s, out);
}

// 32 bytes times a scale, less a minimum.
inline void store32_less(__m256i bytes, float scale, float min, float * out) {
    const __m256 s = _mm256_set1_ps(scale);
    const __m256 m = _mm256_set1_ps(min);
    const __m128i a = _mm256_castsi256_si128(bytes);
    const __m128i b = _mm256_extracti128_si256(bytes, 1);
    _mm256_storeu_ps(out, _mm256_fmsub_ps(floats8(a), s, m));
    _mm256_storeu_ps(out + 8, _mm256_fmsub_ps(floats8(_mm_srli_si128(a, 8)), s, m));
    _mm256_storeu_ps(out + 16, _mm256_fmsub_ps(floats8(b), s, m));
    _mm256_storeu_ps(out + 24, _mm256_fmsub_ps(floats8(_mm_srli_si128(b, 8)), s, m));
}

struct Q8_0 {
    static void expand(const uint8_t * p, float * out) { store32(load32(p + 2), f16_at(p), out); }
};

struct Q4_0 {
    static void expand(const uint8_t * p, float * out) {
        store32(_mm256_sub_epi8(nibbles(p + 2), _mm256_set1_epi8(8)), f16_at(p), out);
    }
};

struct Mxfp4 {
    static void expand(const uint8_t * p, float * out) {
        const uint32_t bits = half_e8m0_bits(p[0]);
        float d;
        __builtin_memcpy(&d, &bits, sizeof d);
        store32(look_up(e2m1_doubled, nibbles(p + 1)), d, out);
    }
};

struct Nvfp4 {
    static void expand(const uint8_t * p, float * out) {
        alignas(32) float d[8];
        _mm256_store_ps(d, half_ue4m3(p, p));
        for (int s = 0; s < 4; s += 2) {
            // Nibbles of 16 bytes: per 8 bytes the low ones, then the high ones.
            const __m256i codes = _mm256_permute4x64_epi64(look_up(e2m1_doubled, nibbles(p + 4 + 8 * s)), _MM_SHUFFLE(3, 1, 2, 0));
            store32(codes, _mm256_set1_ps(d[s]), _mm256_set1_ps(d[s + 1]), out + 16 * s);
        }
    }
};

struct Q4_k {
    static void expand(const uint8_t * p, float * out) {
        const float d    = f16_at(p);
        const float dmin = f16_at(p + 2);
        const KScales s(p + 4);
        for (int i = 0; i < 4; i++) {
            const __m256i q = load32(p + 16 + 32 * i);
            store32_less(low_nibbles(q), d * s.scale(2 * i), dmin * s.min(2 * i), out + 64 * i);
            store32_less(high_nibbles(q), d * s.scale(2 * i + 1), dmin * s.min(2 * i + 1), out + 64 * i + 32);
        }
    }
};

struct Q5_k {
    static void expand(const uint8_t * p, float * out) {
        const float d    = f16_at(p);
        const float dmin = f16_at(p + 2);
        const KScales s(p + 4);
        const __m256i h = load32(p + 16);
        const __m256i bit = _mm256_set1_epi8(16);
        for (int i = 0; i < 4; i++) {
            const __m256i q = load32(p + 48 + 32 * i);
            // Bits 2i and 2i + 1 of every byte of h move to bit 4; what comes over from the next byte is masked.
            const __m256i h0 = _mm256_and_si256(_mm256_slli_epi16(_mm256_srli_epi16(h, 2 * i), 4), bit);
            const __m256i h1 = _mm256_and_si256(_mm256_slli_epi16(_mm256_srli_epi16(h, 2 * i + 1), 4), bit);
            store32_less(_mm256_or_si256(low_nibbles(q), h0), d * s.scale(2 * i), dmin * s.min(2 * i), out + 64 * i);
            store32_less(_mm256_or_si256(high_nibbles(q), h1), d * s.scale(2 * i + 1), dmin * s.min(2 * i + 1), out + 64 * i + 32);
        }
    }
};

struct Q6_k {
    static void expand(const uint8_t * p, float * out) {
        const float d = f16_at(p + 208);
        const __m256i two_bits = _mm256_set1_epi8(0x30);
        const __m256i offset   = _mm256_set1_epi8(32);
        for (int half = 0; half < 2; half++) {
            const __m256i l0 = load32(p + 64 * half);
            const __m256i l1 = load32(p + 64 * half + 32);
            const __m256i h  = load32(p + 128 + 32 * half);
            const __m256i q[4] = {
                _mm256_or_si256(low_nibbles(l0), _mm256_and_si256(_mm256_slli_epi16(h, 4), two_bits)),
                _mm256_or_si256(low_nibbles(l1), _mm256_and_si256(_mm256_slli_epi16(h, 2), two_bits)),
                _mm256_or_si256(high_nibbles(l0), _mm256_and_si256(h, two_bits)),
                _mm256_or_si256(high_nibbles(l1), _mm256_and_si256(_mm256_srli_epi16(h, 2), two_bits)),
            };
            for (int i = 0; i < 4; i++) {
                const uint8_t * s = p + 192 + 8 * half + 2 * i;
                store32(_mm256_sub_epi8(q[i], offset), _mm256_set1_ps(d * float(int8_t(s[0]))), _mm256_set1_ps(d * float(int8_t(s[1]))),
                        out + 128 * half + 32 * i);
            }
        }
    }
};

struct Iq4_xs {
    static void expand(const uint8_t * p, float * out) {
        const float d = f16_at(p);
        alignas(16) int16_t scales[8];
        _mm_store_si128(reinterpret_cast<__m128i *>(scales), iq4_xs_scales(p));
        for (int i = 0; i < 8; i++) store32(look_up(iq4_values, nibbles(p + 8 + 16 * i)), d * float(scales[i]), out + 32 * i);
    }
};

template <class Q> void expand_blocks(const uint8_t * p, int64_t n, int64_t len, size_t bytes, float * out) {
    for (int64_t i = 0; i < n; i += len, p += bytes) Q::expand(p, out + i);
}

}  // namespace

void expand_quants_avx2(const ExpertMatrix & e, int64_t i_row, int64_t i0, int64_t n, float * out) {
    const int64_t len = group_len(e.type);
    const size_t bytes = group_bytes(e.type);
    const uint8_t * p = e.row(i_row) + size_t(i0 / len) * bytes;
    switch (e.type) {
        case WeightType::q8_0:   return expand_blocks<Q8_0>(p, n, len, bytes, out);
        case WeightType::q4_0:   return expand_blocks<Q4_0>(p, n, len, bytes, out);
        case WeightType::q4_k:   return expand_blocks<Q4_k>(p, n, len, bytes, out);
        case WeightType::q5_k:   return expand_blocks<Q5_k>(p, n, len, bytes, out);
        case WeightType::q6_k:   return expand_blocks<Q6_k>(p, n, len, bytes, out);
        case WeightType::iq4_xs: return expand_blocks<Iq4_xs>(p, n, len, bytes, out);
        case WeightType::mxfp4:  return expand_blocks<Mxfp4>(p, n, len, bytes, out);
        case WeightType::nvfp4:  return expand_blocks<Nvfp4>(p, n, len, bytes, out);
        default:                 return;
    }
}

}  // namespace hybrid_moe
