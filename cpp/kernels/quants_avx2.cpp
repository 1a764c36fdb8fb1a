// Products of quantised weights with few token rows on AVX2: integer sums of int8 activations, which are rounded once per call.
//
// Every loop turns over 256 columns: eight blocks of 32, four of 64 or one of 256. Sums of a row are added in the same order
// whatever the number of token rows.
#include "quants_avx2.h"
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

inline __m256i pairs(__m256i products) { return _mm256_madd_epi16(products, _mm256_set1_epi16(1)); }

// A weight type: the bytes of 256 columns (step_bytes), the activations it meets (X), and
//   multiply<M>(w, x, acc): adds the products of 256 columns to acc[2 * M], two chains of eight lanes per token row;
//   x: the M token rows' activations of these columns.

// Types with blocks of 32 and a scale each. Q gives Stride, scales(w), and per block: codes and how they are multiplied.
template <class Q> struct By32 {
    using X = Blocks32;
    static constexpr int block_len  = 32;
    static constexpr int step_bytes = 8 * Q::stride;

    template <int M> static void multiply(const uint8_t * w, const X * x, __m256 * acc) {
        const __m256 d = Q::scales(w);
        alignas(32) float scale[M][8];
        for (int j = 0; j < M; j++) {
            const __m256 both = _mm256_mul_ps(d, _mm256_load_ps(x[j].d));
            _mm256_store_ps(scale[j], both);
            if (Q::offset) acc[2 * j] = _mm256_fmadd_ps(both, _mm256_mul_ps(_mm256_load_ps(x[j].sum), _mm256_set1_ps(-Q::offset)), acc[2 * j]);
        }
#pragma GCC unroll 8
        for (int b = 0; b < 8; b++) {
            const typename Q::Codes codes = Q::decode(w + b * Q::stride);
            for (int j = 0; j < M; j++) {
                const __m256 sum = to_floats(pairs(Q::times(codes, x[j].q + 32 * b)));
                acc[2 * j + b % 2] = _mm256_fmadd_ps(sum, _mm256_broadcast_ss(&scale[j][b]), acc[2 * j + b % 2]);
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
    using X = Blocks32;
    static constexpr int block_len  = 64;
    static constexpr int step_bytes = 4 * 36;

    template <int M> static void multiply(const uint8_t * w, const X * x, __m256 * acc) {
#pragma GCC unroll 4
        for (int b = 0; b < 4; b++, w += 36) {
            alignas(16) float d[4];
            _mm_store_ps(d, half_ue4m3(w));
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                const __m256i q = _mm256_permute4x64_epi64(nibbles(w + 4 + 16 * i), _MM_SHUFFLE(3, 1, 2, 0));
                const __m256i codes = look_up(e2m1_doubled, q);
                const __m256i magnitude = _mm256_abs_epi8(codes);
                const __m256 scale = _mm256_set_m128(_mm_set1_ps(d[2 * i + 1]), _mm_set1_ps(d[2 * i]));
                for (int j = 0; j < M; j++) {
                    const __m256 sum = to_floats(pairs(signed_products(magnitude, codes, x[j].q + 64 * b + 32 * i)));
                    const __m256 both = _mm256_mul_ps(scale, _mm256_broadcast_ss(&x[j].d[2 * b + i]));
                    acc[2 * j + i] = _mm256_fmadd_ps(sum, both, acc[2 * j + i]);
                }
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
                sum[j] = _mm256_add_epi32(sum[j], _mm256_add_epi32(a, b));
            }
        }
        const float d    = f16_at(w);
        const float dmin = f16_at(w + 2);
        for (int j = 0; j < M; j++) {
            const __m128i less = _mm_madd_epi16(mins, _mm_load_si128(reinterpret_cast<const __m128i *>(x[j].sum32)));
            acc[2 * j] = _mm256_fmadd_ps(to_floats(sum[j]), _mm256_set1_ps(d * x[j].d), acc[2 * j]);
            acc[2 * j + 1] = _mm256_fmadd_ps(to_floats(_mm256_zextsi128_si256(less)), _mm256_set1_ps(-dmin * x[j].d), acc[2 * j + 1]);
        }
    }
};

struct Q6_k {
    using X = Blocks256;
    static constexpr int block_len  = 256;
    static constexpr int step_bytes = 210;

    template <int M> static void multiply(const uint8_t * w, const X * x, __m256 * acc) {
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
                    sum[j] = _mm256_add_epi32(sum[j], _mm256_madd_epi16(p, scale));
                }
            }
        }
        const float d = f16_at(w + 208);
        for (int j = 0; j < M; j++) acc[2 * j] = _mm256_fmadd_ps(to_floats(sum[j]), _mm256_set1_ps(d * x[j].d), acc[2 * j]);
    }
};

struct Iq4_xs {
    using X = Blocks256;
    static constexpr int block_len  = 256;
    static constexpr int step_bytes = 136;

    template <int M> static void multiply(const uint8_t * w, const X * x, __m256 * acc) {
        const PairScales scales(twice(_mm256_cvtepu16_epi32(iq4_xs_scales(w))));
        __m256i sum[M];
        for (int j = 0; j < M; j++) sum[j] = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const __m256i codes = look_up(iq4_values, nibbles(w + 8 + 16 * i));
            const __m256i magnitude = _mm256_abs_epi8(codes);
            for (int j = 0; j < M; j++) {
                const __m256i p = signed_products(magnitude, codes, x[j].q + 32 * i);
                sum[j] = _mm256_add_epi32(sum[j], _mm256_madd_epi16(p, scales.at(i)));
            }
        }
        const float d = f16_at(w);
        for (int j = 0; j < M; j++) acc[2 * j] = _mm256_fmadd_ps(to_floats(sum[j]), _mm256_set1_ps(d * x[j].d), acc[2 * j]);
    }
};

// Nearly every model's rows fit one chunk: reading memory in one stream is worth more than keeping four token rows'
// activations in L1 (with chunks of 4096 columns one row of 7168 takes 1.4x the time).
constexpr int chunk_steps = 32;

// How far ahead of the multiplication weights are fetched. 2 KiB: without, 1.2x the time; 1 KiB and a whole row are
// not better.
constexpr int prefetch_bytes = 2048;

// One weight row's piece times M token rows; x: [n_steps][M]. `gap`: bytes between its end and the next row's piece.
// `rest` columns after the last whole step are multiplied in a copy that zeros complete: their scales are 0 there.
template <class Q, int M>
inline void row_piece(const uint8_t * w, ptrdiff_t gap, const typename Q::X * x, int n_steps, int rest, float * out) {
    __m256 acc[2 * M];
    for (__m256 & a : acc) a = _mm256_setzero_ps();
    const uint8_t * last_inside = w + n_steps * Q::step_bytes - prefetch_bytes;
    for (int s = 0; s < n_steps; s++, w += Q::step_bytes, x += M) {
        const uint8_t * ahead = w + prefetch_bytes + (w < last_inside ? 0 : gap);
        for (int i = 0; i < Q::step_bytes; i += 64) __builtin_prefetch(ahead + i);
        Q::template multiply<M>(w, x, acc);
    }
    if (Q::block_len < 256 && rest > 0) {
        uint8_t padded[Q::step_bytes] = {};
        __builtin_memcpy(padded, w, size_t(rest / Q::block_len) * (Q::step_bytes * Q::block_len / 256));
        Q::template multiply<M>(padded, x, acc);
    }
    for (int j = 0; j < M; j++) out[j] = sum_of(_mm256_add_ps(acc[2 * j], acc[2 * j + 1]));
}

template <class Q, int M>
void rows_of(const ExpertMatrix & e, int64_t row0, int64_t row1, const float * const * x, float * const * y) {
    typename Q::X rounded[chunk_steps * M];
    for (int64_t i0 = 0; i0 < e.k; i0 += chunk_steps * 256) {
        const int n = int(e.k - i0 < chunk_steps * 256 ? e.k - i0 : chunk_steps * 256);
        for (int i = 0; i < n; i += 256) {
            for (int j = 0; j < M; j++) rounded[i / 256 * M + j].round(x[j] + i0 + i, n - i < 256 ? n - i : 256);
        }
        const size_t offset = size_t(i0 / 256) * Q::step_bytes;
        const ptrdiff_t gap = ptrdiff_t(e.row_bytes) - n / 256 * Q::step_bytes;
        for (int64_t r = row0; r < row1; r++) {
            float out[M];
            row_piece<Q, M>(e.row(r) + offset, gap, rounded, n / 256, n % 256, out);
            for (int j = 0; j < M; j++) y[j][r] = i0 == 0 ? out[j] : y[j][r] + out[j];
        }
    }
    for (int64_t r = row0; e.k == 0 && r < row1; r++) {
        for (int j = 0; j < M; j++) y[j][r] = 0.0f;
    }
}

template <class Q>
void rows_by(int m, const ExpertMatrix & e, int64_t row0, int64_t row1, const float * const * x, float * const * y) {
    switch (m) {
        case 1: return rows_of<Q, 1>(e, row0, row1, x, y);
        case 2: return rows_of<Q, 2>(e, row0, row1, x, y);
        case 3: return rows_of<Q, 3>(e, row0, row1, x, y);
        case 4: return rows_of<Q, 4>(e, row0, row1, x, y);
    }
}

using Rows = void (*)(int m, const ExpertMatrix & e, int64_t row0, int64_t row1, const float * const * x, float * const * y);

Rows rows_for(WeightType type) {
    switch (type) {
        case WeightType::q8_0:   return rows_by<By32<Q8_0>>;
        case WeightType::q4_0:   return rows_by<By32<Q4_0>>;
        case WeightType::mxfp4:  return rows_by<By32<Mxfp4>>;
        case WeightType::nvfp4:  return rows_by<Nvfp4>;
        case WeightType::q4_k:   return rows_by<K45<false>>;
        case WeightType::q5_k:   return rows_by<K45<true>>;
        case WeightType::q6_k:   return rows_by<Q6_k>;
        case WeightType::iq4_xs: return rows_by<Iq4_xs>;
        default:                 return nullptr;
    }
}

// Whether a token row can be rounded to int8: all magnitudes below 2^22, so that F16 holds every block's scale.
bool can_be_rounded(const float * x, int64_t k) {
    const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
    __m256i largest = _mm256_setzero_si256();  // as integers: NaN and infinity are larger than any number
    int64_t i = 0;
    for (; i + 8 <= k; i += 8) largest = _mm256_max_epi32(largest, _mm256_and_si256(load32(x + i), magnitude));
    return _mm256_testz_si256(_mm256_cmpgt_epi32(largest, _mm256_set1_epi32(0x4A7FFFFF)), _mm256_set1_epi32(-1));
}

// The exact product, for token rows that cannot be rounded. Slow.
void row_as_floats(const ExpertMatrix & e, int64_t row0, int64_t row1, const float * x, float * y) {
    float w[256];
    for (int64_t r = row0; r < row1; r++) {
        __m256 acc = _mm256_setzero_ps();
        for (int64_t i0 = 0; i0 < e.k; i0 += 256) {
            const int64_t n = e.k - i0 < 256 ? e.k - i0 : 256;
            expand_quants_avx2(e, r, i0, n, w);
            for (int64_t i = 0; i < n; i += 8) acc = _mm256_fmadd_ps(_mm256_loadu_ps(w + i), _mm256_loadu_ps(x + i0 + i), acc);
        }
        y[r] = sum_of(acc);
    }
}

}  // namespace

void dot_quants_avx2(const ExpertMatrix & e, int64_t row0, int64_t row1, const TokenRows & t) {
    constexpr int most = 4;
    const Rows rows = rows_for(e.type);
    const float * x[most];
    float * y[most];
    int m = 0;
    for (int64_t j = 0; j < t.m; j++) {
        if (!can_be_rounded(t.x[j], e.k)) {
            row_as_floats(e, row0, row1, t.x[j], t.y[j]);
            continue;
        }
        x[m] = t.x[j];
        y[m] = t.y[j];
        if (++m == most) {
            rows(m, e, row0, row1, x, y);
            m = 0;
        }
    }
    if (m > 0) rows(m, e, row0, row1, x, y);
}

}  // namespace hybrid_moe
