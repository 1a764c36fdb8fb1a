// Weights turned into k-major panels of 16 rows, with AVX2 instructions; included by the files that are compiled for
// AVX2 or AVX-512, after body.h. Codes are turned while they are bytes or halves, where a register holds most of them.
#include "kernels.h"

#include <immintrin.h>

namespace {

// out[i][r] = in[r][i] for 8 rows and columns. Halves of rows are paired by loads, which cost no shuffle.
inline void turn_8x8_floats(const float * in, int64_t in_stride, float * out, int64_t out_stride) {
    const auto pair = [&](int row, int column) {
        return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(in + row * in_stride + column)),
                                    _mm_loadu_ps(in + (row + 4) * in_stride + column), 1);
    };
    for (int half = 0; half < 8; half += 4) {
        const __m256 a = pair(0, half), b = pair(1, half), c = pair(2, half), d = pair(3, half);
        const __m256 ab0 = _mm256_unpacklo_ps(a, b), ab1 = _mm256_unpackhi_ps(a, b);
        const __m256 cd0 = _mm256_unpacklo_ps(c, d), cd1 = _mm256_unpackhi_ps(c, d);
        float * to = out + half * out_stride;
        _mm256_storeu_ps(to, _mm256_shuffle_ps(ab0, cd0, 0x44));
        _mm256_storeu_ps(to + out_stride, _mm256_shuffle_ps(ab0, cd0, 0xEE));
        _mm256_storeu_ps(to + 2 * out_stride, _mm256_shuffle_ps(ab1, cd1, 0x44));
        _mm256_storeu_ps(to + 3 * out_stride, _mm256_shuffle_ps(ab1, cd1, 0xEE));
    }
}

inline void turn_floats(const float * in, int64_t rows, int64_t n, float * out) {
    for (int64_t i = 0; i < n; i += 8) {
        for (int64_t r = 0; r < rows; r += 8) turn_8x8_floats(in + r * piece_k + i, piece_k, out + i * rows + r, rows);
    }
}

// 16 bytes of row a in the lower half, of row b in the upper.
inline __m256i load_pair(const uint8_t * a, const uint8_t * b) {
    const __m128i lower = _mm_loadu_si128(reinterpret_cast<const __m128i *>(a));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(lower), _mm_loadu_si128(reinterpret_cast<const __m128i *>(b)), 1);
}

// Turns 4x4 dwords inside each half: calls f(i, dword i of d[0] to d[3]) for i in [0, 4).
template <class F> inline void turn_dwords(const __m256i (&d)[4], const F & f) {
    const __m256i a = _mm256_unpacklo_epi32(d[0], d[1]), b = _mm256_unpacklo_epi32(d[2], d[3]);
    f(0, _mm256_unpacklo_epi64(a, b));
    f(1, _mm256_unpackhi_epi64(a, b));
    const __m256i c = _mm256_unpackhi_epi32(d[0], d[1]), e = _mm256_unpackhi_epi32(d[2], d[3]);
    f(2, _mm256_unpacklo_epi64(c, e));
    f(3, _mm256_unpackhi_epi64(c, e));
}

// 16 bytes of 16 rows, from `offset` on: calls f(column, v) for each even column. Dword i of v holds, of that column and of
// the next, rows i and i + 8 of [0, 16): four bytes, each of which becomes a vector of eight rows of one column.
template <class F> inline void turn_bytes(const uint8_t * const * rows, int64_t offset, const F & f) {
    __m256i low[4], high[4];
    for (int i = 0; i < 4; i++) {
        const __m256i first = load_pair(rows[i] + offset, rows[i + 4] + offset);
        const __m256i second = load_pair(rows[i + 8] + offset, rows[i + 12] + offset);
        low[i]  = _mm256_unpacklo_epi8(first, second);
        high[i] = _mm256_unpackhi_epi8(first, second);
    }
    turn_dwords(low, [&](int i, __m256i v) { f(2 * i, v); });
    turn_dwords(high, [&](int i, __m256i v) { f(8 + 2 * i, v); });
}

// 16 columns of 16 rows of one-byte codes, times scale [16]. panel: its first column, `width` floats per column.
template <WeightType T> struct TurnBytes {
    static constexpr int64_t columns = 16;

    static void block(const uint8_t * const * rows, int64_t offset, const float * scale, float * panel, int64_t width) {
        const __m256 s0 = _mm256_loadu_ps(scale), s1 = _mm256_loadu_ps(scale + 8);
        turn_bytes(rows, offset, [&](int column, __m256i v) {
            float * to = panel + column * width;
            __m256 a0, a8, b0, b8;  // rows 0 and 8 of this column and of the next
            decode(v, a0, a8, b0, b8);
            _mm256_storeu_ps(to, _mm256_mul_ps(s0, a0));
            _mm256_storeu_ps(to + 8, _mm256_mul_ps(s1, a8));
            _mm256_storeu_ps(to + width, _mm256_mul_ps(s0, b0));
            _mm256_storeu_ps(to + width + 8, _mm256_mul_ps(s1, b8));
        });
    }

    static void decode(__m256i v, __m256 & a0, __m256 & a8, __m256 & b0, __m256 & b8) {
        if constexpr (T == WeightType::fp8_e4m3) {  // by 16-bit lanes, x 2^-120: see avx2.cpp
            const __m256i keep = _mm256_set1_epi16(short(0x87F0));
            const __m256i top  = _mm256_set1_epi32(int(0xFFFF0000u));
            const __m256i odd  = _mm256_and_si256(_mm256_srai_epi16(v, 4), keep);
            const __m256i even = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 4), keep);
            a0 = _mm256_castsi256_ps(_mm256_slli_epi32(even, 16));
            a8 = _mm256_castsi256_ps(_mm256_slli_epi32(odd, 16));
            b0 = _mm256_castsi256_ps(_mm256_and_si256(even, top));
            b8 = _mm256_castsi256_ps(_mm256_and_si256(odd, top));
        } else {
            static_assert(T == WeightType::q8_0, "");
            a0 = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 24), 24));
            a8 = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 16), 24));
            b0 = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 8), 24));
            b8 = _mm256_cvtepi32_ps(_mm256_srai_epi32(v, 24));
        }
    }
};

// 8 columns of 16 rows of halves.
template <WeightType T> struct TurnHalves {
    static constexpr int64_t columns = 8;

    static void block(const uint8_t * const * rows, int64_t offset, const float *, float * panel, int64_t width) {
        for (int r0 = 0; r0 < 16; r0 += 8) {
            __m256i d[4];
            for (int i = 0; i < 4; i++) d[i] = load_pair(rows[r0 + i] + offset, rows[r0 + i + 4] + offset);
            turn_dwords(d, [&](int i, __m256i v) {  // a column in the lower halves of the dwords, the next in the upper
                __m256 a, b;
                decode(v, a, b);
                _mm256_storeu_ps(panel + 2 * i * width + r0, a);
                _mm256_storeu_ps(panel + (2 * i + 1) * width + r0, b);
            });
        }
    }

    static void decode(__m256i v, __m256 & a, __m256 & b) {
        if constexpr (T == WeightType::bf16) {
            a = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
            b = _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(int(0xFFFF0000u))));
        } else {
            static_assert(T == WeightType::f16, "");
            const __m256i lower = _mm256_and_si256(v, _mm256_set1_epi32(0xFFFF));
            const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(lower, _mm256_srli_epi32(v, 16)), 0xD8);
            a = _mm256_cvtph_ps(_mm256_castsi256_si128(both));
            b = _mm256_cvtph_ps(_mm256_extracti128_si256(both, 1));
        }
    }
};

// Which types are turned as codes, and how.
template <WeightType T> struct Turn { static constexpr int64_t columns = 0; };
template <> struct Turn<WeightType::fp8_e4m3> : TurnBytes<WeightType::fp8_e4m3> {};
template <> struct Turn<WeightType::q8_0> : TurnBytes<WeightType::q8_0> {};
template <> struct Turn<WeightType::bf16> : TurnHalves<WeightType::bf16> {};
template <> struct Turn<WeightType::f16> : TurnHalves<WeightType::f16> {};

constexpr float largest_float = 3.40282347e+38f;

// See body_gemm.h. n_rows is the panel's width. Scales must not change, nor groups end, inside the columns turned at once.
template <WeightType T>
inline bool turn_codes(const ExpertMatrix & e, int64_t row0, int64_t n_rows, int64_t i0, int64_t n, float * panel) {
    if constexpr (Turn<T>::columns > 0) {
        using C = Codes<T>;
        const int64_t len = C::block_len(e);
        if (n % Turn<T>::columns || (len < e.k && len % Turn<T>::columns)) return false;
        for (int64_t r0 = 0; r0 < n_rows; r0 += 16, panel += 16) {
            Row row[16];
            for (int64_t r = 0; r < 16; r++) row[r] = row_of(e, row0 + r0 + r);
            for (int64_t i = i0; i < i0 + n;) {
                const int64_t end = C::scaled ? min_i64((i / len + 1) * len, i0 + n) : i0 + n;
                const uint8_t * codes[16];
                float scale[16];
                for (int r = 0; r < 16; r++) {
                    codes[r] = C::at(row[r], i);
                    scale[r] = C::scaled ? C::scale(row[r], i / len) * C::unit : 1.0f;
                    if (C::unit != 1.0f && !(__builtin_fabsf(scale[r]) <= largest_float)) return false;  // the slow way can
                }
                for (int64_t offset = 0; i < end; i += Turn<T>::columns, offset += Turn<T>::columns * int64_t(C::bytes)) {
                    Turn<T>::block(codes, offset, scale, panel + (i - i0) * n_rows, n_rows);
                }
            }
        }
        return true;
    }
    return false;
}

}  // namespace
