// Activations rounded to int8 as ggml's CPU back end does it, 256 columns at a time, in the form the loops of quants_avx2.cpp
// read. Blocks whose largest magnitude is below 2^-100 count as zeros.
#pragma once

#include "quants_avx2.h"

namespace hybrid_moe {
namespace {

constexpr float least_magnitude = 0x1p-100f;

inline __m256 magnitude_of(__m256 v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }

struct Maximum {
    static __m256 of(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
};

struct Sum {
    static __m256 of(__m256 a, __m256 b) {
        return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
    }
};

// Four vectors to one: lane i of each half is the reduction of that half of v[i].
template <class Op> inline __m256 reduce_halves(const __m256 * v) {
    const __m256 a = Op::of(_mm256_unpacklo_ps(v[0], v[1]), _mm256_unpackhi_ps(v[0], v[1]));
    const __m256 b = Op::of(_mm256_unpacklo_ps(v[2], v[3]), _mm256_unpackhi_ps(v[2], v[3]));
    return Op::of(_mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(a), _mm256_castps_pd(b))),
                  _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(a), _mm256_castps_pd(b))));
}

template <class Op> inline __m256 reduce(__m256 a) {  // every lane: the reduction of all
    a = Op::of(a, _mm256_permute2f128_ps(a, a, 1));
    a = Op::of(a, _mm256_shuffle_ps(a, a, _MM_SHUFFLE(1, 0, 3, 2)));
    return Op::of(a, _mm256_shuffle_ps(a, a, _MM_SHUFFLE(2, 3, 0, 1)));
}

// 32 floats times a factor, to nearest even, to int8.
inline __m256i round32(const float * x, __m256 factor) {
    __m256i v[4];
    for (int i = 0; i < 4; i++) v[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), factor));
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// Sums of four bytes each: the low half belongs to the first sixteen.
inline __m256 fours(__m256i bytes) {
    const __m256i words = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    return _mm256_castsi256_ps(_mm256_madd_epi16(words, _mm256_set1_epi16(1)));
}

// ggml's Q8_0: eight blocks, each with the F16 of a 127th of its largest magnitude as its scale.
struct alignas(64) Blocks32 {
    int8_t q[256];
    float  d[8];
    float  sum[8];  // of q

    // n columns, a multiple of 32; the others become zeros.
    void round(const float * given, int n) {
        alignas(32) float completed[256];
        const float * x = given;
        if (n < 256) {
            for (int i = 0; i < 256; i++) completed[i] = i < n ? given[i] : 0.0f;
            x = completed;
        }
        __m256 largest[8];
        for (int b = 0; b < 8; b++) {
            const float * p = x + 32 * b;
            largest[b] = _mm256_max_ps(_mm256_max_ps(magnitude_of(_mm256_loadu_ps(p)), magnitude_of(_mm256_loadu_ps(p + 8))),
                                       _mm256_max_ps(magnitude_of(_mm256_loadu_ps(p + 16)), magnitude_of(_mm256_loadu_ps(p + 24))));
        }
        const __m256 l = reduce_halves<Maximum>(largest);
        const __m256 h = reduce_halves<Maximum>(largest + 4);
        const __m256 most = _mm256_max_ps(_mm256_permute2f128_ps(l, h, 0x20), _mm256_permute2f128_ps(l, h, 0x31));
        const __m256 some = _mm256_cmp_ps(most, _mm256_set1_ps(least_magnitude), _CMP_GE_OQ);
        const __m256 most_127 = _mm256_set1_ps(127.0f);
        alignas(32) float factor[8];
        _mm256_store_ps(factor, _mm256_and_ps(some, _mm256_div_ps(most_127, most)));
        const __m128i halves = _mm256_cvtps_ph(_mm256_div_ps(most, most_127), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm256_store_ps(d, _mm256_and_ps(some, _mm256_cvtph_ps(halves)));
        __m256 sums[8];
        for (int b = 0; b < 8; b++) {
            const __m256i bytes = round32(x + 32 * b, _mm256_broadcast_ss(factor + b));
            _mm256_store_si256(reinterpret_cast<__m256i *>(q + 32 * b), bytes);
            sums[b] = fours(bytes);
        }
        const __m256 sl = reduce_halves<Sum>(sums);
        const __m256 sh = reduce_halves<Sum>(sums + 4);
        const __m256 all = Sum::of(_mm256_permute2f128_ps(sl, sh, 0x20), _mm256_permute2f128_ps(sl, sh, 0x31));
        _mm256_store_ps(sum, _mm256_cvtepi32_ps(_mm256_castps_si256(all)));
    }
};

// The same with the second and the third eight of every 32 exchanged, which is how NVFP4's nibbles come.
struct Blocks32Swapped : Blocks32 {
    void round(const float * x, int n) {
        Blocks32::round(x, n);
        for (int i = 0; i < 256; i += 32) {
            __m256i * p = reinterpret_cast<__m256i *>(q + i);
            _mm256_store_si256(p, _mm256_permute4x64_epi64(_mm256_load_si256(p), _MM_SHUFFLE(3, 1, 2, 0)));
        }
    }
};

// ggml's Q8_K: one block; the value of largest magnitude, the first one if several are, becomes -127.
struct alignas(64) Blocks256 {
    int8_t  q[256];
    int16_t sum16[16];
    int16_t sum32[8];
    float   d;

    static float of_largest_magnitude(const float * x) {
        __m256 top = _mm256_loadu_ps(x);
        __m256 bottom = top;
        for (int i = 8; i < 256; i += 8) {
            const __m256 v = _mm256_loadu_ps(x + i);
            top = _mm256_max_ps(top, v);
            bottom = _mm256_min_ps(bottom, v);
        }
        const float most  = _mm256_cvtss_f32(reduce<Maximum>(top));
        const float least = -_mm256_cvtss_f32(reduce<Maximum>(_mm256_xor_ps(bottom, _mm256_set1_ps(-0.0f))));
        if (most != -least) return most > -least ? most : least;
        int first = 0;
        while (x[first] != most && x[first] != least) first++;
        return x[first];
    }

    void round(const float * x, int) {
        const float extreme = of_largest_magnitude(x);
        const bool some = __builtin_fabsf(extreme) >= least_magnitude;
        const float factor = some ? -127.0f / extreme : 0.0f;
        d = some ? 1.0f / factor : 0.0f;
        __m256 sums[8];
        for (int b = 0; b < 8; b++) {
            const __m256i bytes = round32(x + 32 * b, _mm256_set1_ps(factor));
            _mm256_store_si256(reinterpret_cast<__m256i *>(q + 32 * b), bytes);
            sums[b] = fours(bytes);
        }
        // Sums of blocks 0..7: of their first sixteen in one half, of the others in the other.
        const __m256i halves = _mm256_packs_epi32(_mm256_castps_si256(reduce_halves<Sum>(sums)), _mm256_castps_si256(reduce_halves<Sum>(sums + 4)));
        const __m128i firsts = _mm256_castsi256_si128(halves);
        const __m128i others = _mm256_extracti128_si256(halves, 1);
        _mm_store_si128(reinterpret_cast<__m128i *>(sum16), _mm_unpacklo_epi16(firsts, others));
        _mm_store_si128(reinterpret_cast<__m128i *>(sum16 + 8), _mm_unpackhi_epi16(firsts, others));
        _mm_store_si128(reinterpret_cast<__m128i *>(sum32), _mm_add_epi16(firsts, others));
    }
};

}  // namespace
}  // namespace hybrid_moe
