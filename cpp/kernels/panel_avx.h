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

inline __m256i load_32_bytes(const uint8_t * p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }

// Interleaving row i with row i + n/2 over and over turns the block; each step halves the columns in a register.
template <class F> inline void turn_columns(const __m256i (&g)[2], int column, const F & f) {
    f(column, _mm256_unpacklo_epi8(g[0], g[1]));
    f(column + 1, _mm256_unpackhi_epi8(g[0], g[1]));
}

template <class F> inline void turn_columns(const __m256i (&g)[4], int column, const F & f) {
    turn_columns({_mm256_unpacklo_epi8(g[0], g[2]), _mm256_unpacklo_epi8(g[1], g[3])}, column, f);
    turn_columns({_mm256_unpackhi_epi8(g[0], g[2]), _mm256_unpackhi_epi8(g[1], g[3])}, column + 2, f);
}

// 16 rows of 32 bytes: calls f(c, codes of column c in rows 0 to 15, then those of column c + 16) for c in [0, 16).
template <class F> inline void turn_16x32_bytes(const uint8_t * const * rows, const F & f) {
    for (int half = 0; half < 2; half++) {
        __m256i a[8];
        for (int i = 0; i < 8; i++) {
            const __m256i x = load_32_bytes(rows[i]), y = load_32_bytes(rows[i + 8]);
            a[i] = half ? _mm256_unpackhi_epi8(x, y) : _mm256_unpacklo_epi8(x, y);
        }
        __m256i low[4], high[4];
        for (int i = 0; i < 4; i++) {
            low[i]  = _mm256_unpacklo_epi8(a[i], a[i + 4]);
            high[i] = _mm256_unpackhi_epi8(a[i], a[i + 4]);
        }
        turn_columns(low, 8 * half, f);
        turn_columns(high, 8 * half + 4, f);
    }
}

// 8 rows of 16 halves: calls f(c, halves of column c in rows 0 to 7, then those of column c + 8) for c in [0, 8).
template <class F> inline void turn_8x16_halves(const uint8_t * const * rows, const F & f) {
    for (int half = 0; half < 2; half++) {
        __m256i a[4];
        for (int i = 0; i < 4; i++) {
            const __m256i x = load_32_bytes(rows[i]), y = load_32_bytes(rows[i + 4]);
            a[i] = half ? _mm256_unpackhi_epi16(x, y) : _mm256_unpacklo_epi16(x, y);
        }
        for (int quarter = 0; quarter < 2; quarter++) {
            __m256i b[2];
            for (int i = 0; i < 2; i++) {
                b[i] = quarter ? _mm256_unpackhi_epi16(a[i], a[i + 2]) : _mm256_unpacklo_epi16(a[i], a[i + 2]);
            }
            f(4 * half + 2 * quarter, _mm256_unpacklo_epi16(b[0], b[1]));
            f(4 * half + 2 * quarter + 1, _mm256_unpackhi_epi16(b[0], b[1]));
        }
    }
}

// E4M3 rows in this order make the 16-bit lanes of a turned column (see avx2.cpp) fall into four parts of 4 rows x 2 columns,
// in the order of the rows, as value x 2^-120.
constexpr int fp8_row(int i) { return i / 4 + (i % 4 == 1 ? 0 : i % 4 == 3 ? 4 : i % 4 == 0 ? 8 : 12); }

// 32 columns of 16 rows: codes times 2^-120 times scale [16].
inline void fp8_panel(const uint8_t * const * rows, const float * scale, float * panel, int64_t stride) {
    const uint8_t * ordered[16];
    for (int i = 0; i < 16; i++) ordered[i] = rows[fp8_row(i)];
    const __m256i keep = _mm256_set1_epi16(short(0x87F0));
    const __m256i top  = _mm256_set1_epi32(int(0xFFFF0000u));
    __m256 s[4];
    for (int i = 0; i < 4; i++) s[i] = _mm256_broadcast_ps(reinterpret_cast<const __m128 *>(scale + 4 * i));
    turn_16x32_bytes(ordered, [&](int column, __m256i v) {
        const __m256i odd  = _mm256_and_si256(_mm256_srai_epi16(v, 4), keep);
        const __m256i even = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 4), keep);
        const __m256 a = _mm256_mul_ps(s[0], _mm256_castsi256_ps(_mm256_slli_epi32(odd, 16)));
        const __m256 b = _mm256_mul_ps(s[1], _mm256_castsi256_ps(_mm256_and_si256(odd, top)));
        const __m256 c = _mm256_mul_ps(s[2], _mm256_castsi256_ps(_mm256_slli_epi32(even, 16)));
        const __m256 d = _mm256_mul_ps(s[3], _mm256_castsi256_ps(_mm256_and_si256(even, top)));
        float * first  = panel + column * stride;
        float * second = first + 16 * stride;
        _mm256_storeu_ps(first, _mm256_permute2f128_ps(a, b, 0x20));
        _mm256_storeu_ps(first + 8, _mm256_permute2f128_ps(c, d, 0x20));
        _mm256_storeu_ps(second, _mm256_permute2f128_ps(a, b, 0x31));
        _mm256_storeu_ps(second + 8, _mm256_permute2f128_ps(c, d, 0x31));
    });
}

// 32 columns of 16 rows of int8 times scale [16].
inline void i8_panel(const uint8_t * const * rows, const float * scale, float * panel, int64_t stride) {
    const __m256 s0 = _mm256_loadu_ps(scale), s1 = _mm256_loadu_ps(scale + 8);
    turn_16x32_bytes(rows, [&](int column, __m256i v) {
        const __m128i halves[2] = {_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)};
        for (int i = 0; i < 2; i++) {
            float * to = panel + (column + 16 * i) * stride;
            const __m256i a = _mm256_cvtepi8_epi32(halves[i]);
            const __m256i b = _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(halves[i], halves[i]));
            _mm256_storeu_ps(to, _mm256_mul_ps(s0, _mm256_cvtepi32_ps(a)));
            _mm256_storeu_ps(to + 8, _mm256_mul_ps(s1, _mm256_cvtepi32_ps(b)));
        }
    });
}

// 16 columns of 8 rows.
inline void bf16_panel(const uint8_t * const * rows, float * panel, int64_t stride) {
    turn_8x16_halves(rows, [&](int column, __m256i v) {
        const __m256i zero = _mm256_setzero_si256();
        const __m256 a = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, v));
        const __m256 b = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, v));
        _mm256_storeu_ps(panel + column * stride, _mm256_permute2f128_ps(a, b, 0x20));
        _mm256_storeu_ps(panel + (column + 8) * stride, _mm256_permute2f128_ps(a, b, 0x31));
    });
}

inline void f16_panel(const uint8_t * const * rows, float * panel, int64_t stride) {
    turn_8x16_halves(rows, [&](int column, __m256i v) {
        _mm256_storeu_ps(panel + column * stride, _mm256_cvtph_ps(_mm256_castsi256_si128(v)));
        _mm256_storeu_ps(panel + (column + 8) * stride, _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1)));
    });
}

// What the types that are turned as codes have in common: how 32 columns of 16 rows become floats.
template <WeightType T> struct Turn { static constexpr bool known = false; };

// `rows` point at the first of the columns; `scale` is that of each row.
template <> struct Turn<WeightType::fp8_e4m3> {
    static constexpr bool known = true;
    static void block(const uint8_t * const * rows, const float * scale, float * to, int64_t stride) { fp8_panel(rows, scale, to, stride); }
};

template <> struct Turn<WeightType::q8_0> {
    static constexpr bool known = true;
    static void block(const uint8_t * const * rows, const float * scale, float * to, int64_t stride) { i8_panel(rows, scale, to, stride); }
};

template <void (*Eight)(const uint8_t * const * rows, float * panel, int64_t stride)> struct TurnHalves {
    static constexpr bool known = true;
    static void block(const uint8_t * const * rows, const float *, float * to, int64_t stride) {
        for (int part = 0; part < 4; part++) {
            const uint8_t * eight[8];
            for (int r = 0; r < 8; r++) eight[r] = rows[part % 2 * 8 + r] + part / 2 * 32;
            Eight(eight, to + part / 2 * 16 * stride + part % 2 * 8, stride);
        }
    }
};

template <> struct Turn<WeightType::bf16> : TurnHalves<bf16_panel> {};
template <> struct Turn<WeightType::f16> : TurnHalves<f16_panel> {};

// See body_gemm.h. n_rows is the panel's width. A scale block, or a group, is whole multiples of 32 columns.
template <WeightType T>
inline bool turn_codes(const ExpertMatrix & e, int64_t row0, int64_t n_rows, int64_t i0, int64_t n, float * panel) {
    if constexpr (Turn<T>::known) {
        const int64_t len = Codes<T>::block_len(e);
        if (n % 32 || (len < e.k && len % 32)) return false;
        for (int64_t r0 = 0; r0 < n_rows; r0 += 16, panel += 16) {
            Row row[16];
            for (int64_t r = 0; r < 16; r++) row[r] = row_of(e, row0 + r0 + r);
            float scale[16];
            int64_t next_block = i0;  // where the scales change
            for (int64_t i = i0; i < i0 + n; i += 32) {
                if (Codes<T>::scaled && i >= next_block) {
                    for (int r = 0; r < 16; r++) scale[r] = Codes<T>::scale(row[r], i / len);
                    next_block = (i / len + 1) * len;
                }
                const uint8_t * codes[16];
                for (int r = 0; r < 16; r++) codes[r] = Codes<T>::at(row[r], i);
                Turn<T>::block(codes, scale, panel + (i - i0) * n_rows, n_rows);
            }
        }
        return true;
    }
    return false;
}

}  // namespace
