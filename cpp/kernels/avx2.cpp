// Eight floats on AVX2 + FMA + F16C. Intrinsics only, no STL: this file alone is compiled for that ISA.
#include "quants.h"

#include <immintrin.h>

namespace hybrid_moe {
namespace {

struct Vec {
    static constexpr int   width    = 8;
    static constexpr float fp8_unit = 0x1p120f;
    static constexpr int   gemm_tokens = 6;  // 12 accumulators
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

    static Vec where_positive(Vec a, Vec b) {
        return {_mm256_and_ps(_mm256_cmp_ps(a.v, _mm256_setzero_ps(), _CMP_GT_OQ), b.v)};
    }

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

    // 32 codes to 32 floats by 16-bit lanes: shifting a lane right by 4 (arithmetically, which keeps the sign) and masking
    // it with 0x87F0 gives BF16 of value x 2^-120, subnormals included; the low and the high half of a dword are then two
    // floats. 14 instructions per 32 weights with the products; what lost: bytes to dwords by sign extension (20),
    // nibble tables (16).
    static constexpr int   fp8_group   = 32;
    static constexpr int   fp8_rows    = 2;  // 10 % faster than one, measured on Zen 3
    static constexpr int   fp8_parts   = 4;
    static constexpr int   fp8_x_bytes = 128;
    static constexpr float fp8_y_unit  = 0x1p60f;  // the other half of 2^120 is in the activations: neither overflows
    struct Fp8 { __m256 part[4]; };
    static Fp8 fp8_decode(const uint8_t * p) {
        const __m256i keep = _mm256_set1_epi16(short(0x87F0));
        const __m256i top  = _mm256_set1_epi32(int(0xFFFF0000u));
        const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
        const __m256i odd  = _mm256_and_si256(_mm256_srai_epi16(v, 4), keep);
        const __m256i even = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 4), keep);
        return {{_mm256_castsi256_ps(_mm256_slli_epi32(odd, 16)), _mm256_castsi256_ps(_mm256_and_si256(odd, top)),
                 _mm256_castsi256_ps(_mm256_slli_epi32(even, 16)), _mm256_castsi256_ps(_mm256_and_si256(even, top))}};
    }
    // The parts take every fourth activation, from the second, the fourth, the first and the third on.
    static void fp8_store_x(const float * x, float scale, uint8_t * out) {
        const __m256 s = _mm256_set1_ps(scale * 0x1p60f);
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        const __m256 a = _mm256_loadu_ps(x), b = _mm256_loadu_ps(x + 8), c = _mm256_loadu_ps(x + 16), d = _mm256_loadu_ps(x + 24);
        const __m256 even_ab = _mm256_shuffle_ps(a, b, 0x88), even_cd = _mm256_shuffle_ps(c, d, 0x88);
        const __m256 odd_ab = _mm256_shuffle_ps(a, b, 0xDD), odd_cd = _mm256_shuffle_ps(c, d, 0xDD);
        const __m256 parts[4] = {_mm256_shuffle_ps(odd_ab, odd_cd, 0x88), _mm256_shuffle_ps(odd_ab, odd_cd, 0xDD),
                                 _mm256_shuffle_ps(even_ab, even_cd, 0x88), _mm256_shuffle_ps(even_ab, even_cd, 0xDD)};
        for (int i = 0; i < 4; i++) {
            const __m256 ordered = _mm256_permutevar8x32_ps(parts[i], order);
            _mm256_storeu_ps(reinterpret_cast<float *>(out) + 8 * i, _mm256_mul_ps(ordered, s));
        }
    }
    static Vec fp8_multiply(__m256 part, const uint8_t * x, Vec acc) {
        return {_mm256_fmadd_ps(part, _mm256_loadu_ps(reinterpret_cast<const float *>(x)), acc.v)};
    }

    static Vec from_i8(const uint8_t * p) { return {_mm256_cvtepi32_ps(sign_extend(p))}; }

    static Vec from_bf16(const uint8_t * p) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
    }

    static Vec from_f16(const uint8_t * p) {
        return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)))};
    }

    static constexpr auto multiply_quants    = multiply_quants_avx2;
    static constexpr auto expand_quants = expand_quants_avx2;
};

}  // namespace

#include "body.h"
#include "body_fp8.h"
#include "panel_avx.h"
#include "body_gemm.h"

namespace {

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
const Kernels kernels_avx2 = {"avx2", dot_any, gemm, expand, activate, accumulate, multiply_add, has_fp8_nan};

}  // namespace hybrid_moe
