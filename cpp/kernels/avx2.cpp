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
    static Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }

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
const Kernels kernels_avx2 = {"avx2", dot, gemm, expand, has_fp8_nan};

}  // namespace hybrid_moe
