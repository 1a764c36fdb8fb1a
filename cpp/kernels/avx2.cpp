// Eight floats on AVX2 + FMA + F16C. Intrinsics only, no STL: this file alone is compiled for that ISA.
#include "kernels.h"

#include <immintrin.h>

namespace hybrid_moe {
namespace {

struct Vec {
    static constexpr int   width    = 8;
    static constexpr float fp8_unit = 0x1p120f;
    __m256 v;

    // E4M3 bits are used as the top of a float, so its subnormals are float subnormals: "denormals are zero" must be
    // off while we compute, whatever the host chose.
    struct Environment {
        unsigned saved;
        Environment() : saved(_mm_getcsr()) { _mm_setcsr(saved & ~0x8040u); }
        ~Environment() { _mm_setcsr(saved); }
    };

    static Vec zero() { return {_mm256_setzero_ps()}; }
    static Vec set1(float a) { return {_mm256_set1_ps(a)}; }
    static Vec load(const float * p) { return {_mm256_loadu_ps(p)}; }
    void store(float * p) const { _mm256_storeu_ps(p, v); }
    static Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
    static Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
    static Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
    static Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
    static Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
    static Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }

    // exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln 2 / 2; Taylor series of exp(r) to r^7, error below 2 ulp.
    // Beyond the range of float: 0 and infinity. NaN stays NaN.
    static Vec exp(Vec a) {
        const __m256 low = _mm256_set1_ps(-87.33654f);
        const __m256 high = _mm256_set1_ps(88.72283f);
        const __m256 x = _mm256_max_ps(low, _mm256_min_ps(high, a.v));  // NaN passes
        const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
        r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
        __m256 p = _mm256_set1_ps(1.0f / 5040);
        const float series[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
        for (const float c : series) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
        // 2^n in two factors: n runs to 128, one beyond the exponents of float.
        const __m256i i = _mm256_cvtps_epi32(n);
        const __m256i half = _mm256_srai_epi32(i, 1);
        const __m256i bias = _mm256_set1_epi32(127);
        const __m256 f1 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
        const __m256 f2 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(i, half), bias), 23));
        __m256 y = _mm256_mul_ps(_mm256_mul_ps(p, f1), f2);
        y = _mm256_blendv_ps(y, _mm256_setzero_ps(), _mm256_cmp_ps(a.v, low, _CMP_LT_OQ));
        y = _mm256_blendv_ps(y, _mm256_set1_ps(__builtin_inff()), _mm256_cmp_ps(a.v, high, _CMP_GT_OQ));
        return {_mm256_blendv_ps(y, a.v, _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q))};
    }

    static uint16_t f16_bits(float f) { return uint16_t(_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }

    static void reduce4(Vec a, Vec b, Vec c, Vec d, float * out) {
        const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a.v, b.v), _mm256_hadd_ps(c.v, d.v));
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
    }

    static float f16_scale(const uint8_t * p) {
        uint16_t h;
        __builtin_memcpy(&h, p, sizeof h);
        return _cvtsh_ss(h);
    }

    static __m256i sign_extend(const uint8_t * p) {
        return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
    }

    // s eeee mmm moves to bits 31 and 26..20: the value is code x 2^-120, subnormals included.
    static Vec from_fp8(const uint8_t * p) {
        const __m256i bits = _mm256_slli_epi32(sign_extend(p), 20);
        return {_mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(int(0x87FFFFFFu))))};
    }

    static Vec from_i8(const uint8_t * p) { return {_mm256_cvtepi32_ps(sign_extend(p))}; }

    static Vec from_bf16(const uint8_t * p) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
    }

    static Vec from_f16(const uint8_t * p) {
        return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)))};
    }
};

}  // namespace

#include "body.h"

namespace {

// FP8, few token rows: the decode loop, bound by memory. Columns go in chunks whose activations stay in L1, rows follow
// one another inside a chunk, and the next row's piece is prefetched while this one is multiplied.
//
// 32 codes become 32 floats by 16-bit lanes: shifting a lane right by 4 (arithmetically, which keeps the sign) and
// masking it with 0x87F0 gives BF16 of value x 2^-120, subnormals included; the low and the high half of a dword are
// then two floats. 14 instructions per 32 weights with the products; what lost: byte to dword sign extension (20),
// nibble tables (16). Codes leave in the order 1 5 9 .., 3 7 11 .., 0 4 8 .., 2 6 10 ..: activations are stored so.
namespace fp8 {

constexpr int64_t group  = 32;
constexpr float   x_unit = 0x1p60f;  // half of 2^120 goes into the activations, half into the sum: neither overflows
constexpr int64_t chunk_floats = 4096;

// Activations [i0, i0 + n) of one token row, times their block's scale, in groups of 32 in the order above.
inline void prepare(const float * x, const float * scale, int64_t block_k, int64_t i0, int64_t n, float * out) {
    float scaled[group];
    for (int64_t g = 0; g < n; g += group) {
        for (int64_t i = 0; i < group;) {
            const int64_t column = i0 + g + i;
            const float s = (scale ? scale[column / block_k] : 1.0f) * x_unit;
            const int64_t left = scale ? block_k - column % block_k : group;
            const int64_t end = min_i64(i + left, group);
            for (; i < end; i++) scaled[i] = x[i0 + g + i] * s;
        }
        for (int64_t i = 0; i < 8; i++) {
            out[g + i]      = scaled[4 * i + 1];
            out[g + 8 + i]  = scaled[4 * i + 3];
            out[g + 16 + i] = scaled[4 * i];
            out[g + 24 + i] = scaled[4 * i + 2];
        }
    }
}

// One weight row's piece of n columns times M token rows; x: M prepared pieces, n floats apart.
template <int M>
inline void row_piece(const uint8_t * w, const uint8_t * next, const float * x, int64_t n, float * out) {
    const __m256i keep = _mm256_set1_epi16(short(0x87F0));
    const __m256i top  = _mm256_set1_epi32(int(0xFFFF0000u));
    constexpr int C = M == 1 ? 4 : M == 2 ? 4 : 2;  // chains per token row, to hide the latency of fma
    __m256 acc[M][C];
    for (int j = 0; j < M; j++) {
        for (int c = 0; c < C; c++) acc[j][c] = _mm256_setzero_ps();
    }
    for (int64_t i = 0; i < n; i += group) {
        _mm_prefetch(reinterpret_cast<const char *>(next + i), _MM_HINT_T0);
        const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(w + i));
        const __m256i odd  = _mm256_and_si256(_mm256_srai_epi16(v, 4), keep);
        const __m256i even = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 4), keep);
        const __m256 f[4] = {
            _mm256_castsi256_ps(_mm256_slli_epi32(odd, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(odd, top)),
            _mm256_castsi256_ps(_mm256_slli_epi32(even, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(even, top)),
        };
        for (int j = 0; j < M; j++) {
            for (int q = 0; q < 4; q++) acc[j][q % C] = _mm256_fmadd_ps(f[q], _mm256_loadu_ps(x + j * n + i + 8 * q), acc[j][q % C]);
        }
    }
    for (int j = 0; j < M; j++) {
        __m256 sum = _mm256_add_ps(acc[j][0], acc[j][1]);
        if (C == 4) sum = _mm256_add_ps(sum, _mm256_add_ps(acc[j][C - 2], acc[j][C - 1]));
        const __m128 h = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
        const __m128 q = _mm_add_ps(h, _mm_movehl_ps(h, h));
        out[j] = _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q))) * x_unit;
    }
}

// Rows [row0, row1) that share their scales: `scale` per column block, or null when `row_scale` (one per row) has all.
template <int M>
void rows(const ExpertMatrix & e, int64_t row0, int64_t row1, const float * scale, const float * row_scale,
          const float * const * x, float * const * y) {
    alignas(32) float xs[chunk_floats];
    constexpr int64_t chunk = chunk_floats / M / group * group;
    const int64_t whole = e.k / group * group;
    for (int64_t i0 = 0; i0 == 0 || i0 < whole; i0 += chunk) {
        const int64_t n = min_i64(chunk, whole - i0);
        for (int j = 0; j < M; j++) prepare(x[j], scale, e.block_k, i0, n, xs + j * n);
        for (int64_t r = row0; r < row1; r++) {
            const uint8_t * w = e.row(r) + i0;
            const uint8_t * next = r + 1 < e.n_rows ? w + e.row_bytes : w;
            float out[M];
            row_piece<M>(w, next, xs, n, out);
            for (int j = 0; j < M; j++) y[j][r] = i0 == 0 ? out[j] : y[j][r] + out[j];
        }
    }
    for (int64_t r = row0; r < row1; r++) {
        for (int64_t i = whole; i < e.k; i++) {
            const float w = f32_of_fp8(e.row(r)[i]) * (scale ? scale[i / e.block_k] : 1.0f);
            for (int j = 0; j < M; j++) y[j][r] += w * x[j][i];
        }
        for (int j = 0; row_scale && j < M; j++) y[j][r] *= row_scale[r - row0];
    }
}

template <int M>
void all_rows(const ExpertMatrix & e, int64_t row0, int64_t row1, const float * const * x, float * const * y) {
    if (e.n_k_blocks() == 1 && e.block_rows == 1) {  // per output channel
        rows<M>(e, row0, row1, nullptr, e.scale + row0, x, y);
        return;
    }
    for (int64_t r = row0; r < row1;) {
        const int64_t end = min_i64((r / e.block_rows + 1) * e.block_rows, row1);
        rows<M>(e, r, end, e.row_scale(r), nullptr, x, y);
        r = end;
    }
}

// Activations are prepared once per block of rows: with very low blocks that would cost more than it saves.
constexpr int64_t min_block_rows = 16;

bool suits(const ExpertMatrix & e) { return e.block_rows >= min_block_rows || (e.n_k_blocks() == 1 && e.block_rows == 1); }

}  // namespace fp8

void dot_avx2(const ExpertMatrix & e, int64_t row0, int64_t row1, const TokenRows & t) {
    if (e.type != WeightType::fp8_e4m3 || !fp8::suits(e)) {
        dot(e, row0, row1, t);
        return;
    }
    const Vec::Environment environment;
    int64_t j = 0;
    for (; j + 4 <= t.m; j += 4) fp8::all_rows<4>(e, row0, row1, t.x + j, t.y + j);
    if (t.m - j == 3) fp8::all_rows<3>(e, row0, row1, t.x + j, t.y + j);
    if (t.m - j == 2) fp8::all_rows<2>(e, row0, row1, t.x + j, t.y + j);
    if (t.m - j == 1) fp8::all_rows<1>(e, row0, row1, t.x + j, t.y + j);
}

bool has_fp8_nan(const uint8_t * codes, size_t n) {
    const __m256i magnitude = _mm256_set1_epi8(0x7F);
    __m256i found = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m256i c = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(codes + i));
        found = _mm256_or_si256(found, _mm256_cmpeq_epi8(_mm256_and_si256(c, magnitude), magnitude));
    }
    bool any = !_mm256_testz_si256(found, found);
    for (; i < n; i++) any = any || (codes[i] & 0x7F) == 0x7F;
    return any;
}

}  // namespace

extern const Kernels kernels_avx2;
const Kernels kernels_avx2 = {"avx2", dot_avx2, gemm, expand, activate, accumulate, multiply_add, has_fp8_nan};

}  // namespace hybrid_moe
