// Activations rounded to int8 as ggml's CPU back end does it, 256 columns at a time, in the form the loops of quants_avx2.cpp
// read. Blocks whose largest magnitude is below 2^-100 count as zeros.
#pragma once

#include "quants_avx2.h"

namespace hybrid_moe {
namespace {

constexpr float least_magnitude = 0x1p-100f;

inline __m256 magnitude_of(__m256 v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }

inline float largest_of(__m256 v) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two  = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// 32 floats times a factor, to nearest even, to int8.
inline __m256i round32(const float * x, float factor) {
    const __m256 f = _mm256_set1_ps(factor);
    __m256i v[4];
    for (int i = 0; i < 4; i++) v[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), f));
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// Sums of the 16 bytes of each half.
inline void sums16(__m256i bytes, int & low, int & high) {
    const __m256i words = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    const __m256i dwords = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
    alignas(32) int32_t d[8];
    _mm256_store_si256(reinterpret_cast<__m256i *>(d), dwords);
    low  = d[0] + d[1] + d[2] + d[3];
    high = d[4] + d[5] + d[6] + d[7];
}

// ggml's Q8_0: eight blocks, each with the F16 of a 127th of its largest magnitude as its scale.
struct alignas(64) Blocks32 {
    int8_t q[256];
    float  d[8];
    float  sum[8];  // of q

    // n columns, a multiple of 32; the others become zeros.
    void round(const float * x, int n) {
        for (int b = 0; b < 8; b++) {
            __m256 largest = _mm256_setzero_ps();
            for (int i = 0; i < 32 && 32 * b < n; i += 8) {
                largest = _mm256_max_ps(largest, magnitude_of(_mm256_loadu_ps(x + 32 * b + i)));
            }
            const float most = largest_of(largest);
            __m256i bytes = _mm256_setzero_si256();
            d[b] = 0.0f;
            if (most >= least_magnitude) {
                bytes = round32(x + 32 * b, 127.0f / most);
                d[b] = _cvtsh_ss(_cvtss_sh(most / 127.0f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
            }
            _mm256_store_si256(reinterpret_cast<__m256i *>(q + 32 * b), bytes);
            int low, high;
            sums16(bytes, low, high);
            sum[b] = float(low + high);
        }
    }
};

// ggml's Q8_K: one block; the value of largest magnitude, the first one if several are, becomes -127.
struct alignas(64) Blocks256 {
    int8_t  q[256];
    int16_t sum16[16];
    int16_t sum32[8];
    float   d;

    void round(const float * x, int) {
        __m256 largest = _mm256_setzero_ps();
        for (int i = 0; i < 256; i += 8) largest = _mm256_max_ps(largest, magnitude_of(_mm256_loadu_ps(x + i)));
        const float most = largest_of(largest);
        float factor = 0.0f;
        d = 0.0f;
        if (most >= least_magnitude) {
            int first = 0;
            while (__builtin_fabsf(x[first]) != most) first++;
            factor = -127.0f / x[first];
            d = 1.0f / factor;
        }
        for (int b = 0; b < 8; b++) {
            const __m256i bytes = round32(x + 32 * b, factor);
            _mm256_store_si256(reinterpret_cast<__m256i *>(q + 32 * b), bytes);
            int low, high;
            sums16(bytes, low, high);
            sum16[2 * b]     = int16_t(low);
            sum16[2 * b + 1] = int16_t(high);
            sum32[b]         = int16_t(low + high);
        }
    }
};

}  // namespace
}  // namespace hybrid_moe
