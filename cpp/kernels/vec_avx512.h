// Sixteen floats on AVX-512 F/BW/DQ/VL, for the files that are compiled for it. The including file says how FP8 groups are
// decoded: it derives Vec from this. Intrinsics only.
#include <immintrin.h>

namespace {

struct Vec512 {
    static constexpr int   width    = 16;
    static constexpr float fp8_unit = 0x1p120f;  // from_fp8: as in avx2.cpp
    static constexpr int   fp8_rows    = 1;   // of static estimates, the best
    static constexpr int   gemm_tokens = 12;  // 24 accumulators of 32
    __m512 v;

    // E4M3 subnormals may be float subnormals while we compute: "denormals are zero" must be off.
    struct Environment {
        unsigned saved;
        Environment() : saved(_mm_getcsr()) { _mm_setcsr(saved & ~0x8040u); }
        ~Environment() { _mm_setcsr(saved); }
    };

    static float f16_scale(const uint8_t * p) {
        uint16_t h;
        __builtin_memcpy(&h, p, sizeof h);
        return _cvtsh_ss(h);
    }
    static uint16_t f16_bits(float f) { return uint16_t(_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }

    // An AVX-512 CPU runs AVX2, and decoding one row is bound by memory there.
    static constexpr auto multiply_quants    = hybrid_moe::multiply_quants_avx2;
    static constexpr auto expand_quants = hybrid_moe::expand_quants_avx2;

    static __m512i sign_extend(const uint8_t * p) {
        return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    }
};

// The words of the vocabulary that return a Vec.
#define HYBRID_MOE_AVX512_WORDS                                                                                        \
    static Vec make(__m512 a) { Vec r; r.v = a; return r; }                                                            \
    static Vec zero() { return make(_mm512_setzero_ps()); }                                                            \
    static Vec set1(float a) { return make(_mm512_set1_ps(a)); }                                                       \
    static Vec load(const float * p) { return make(_mm512_loadu_ps(p)); }                                              \
    void store(float * p) const { _mm512_storeu_ps(p, v); }                                                            \
    static Vec fma(Vec a, Vec b, Vec c) { return make(_mm512_fmadd_ps(a.v, b.v, c.v)); }                               \
    static Vec add(Vec a, Vec b) { return make(_mm512_add_ps(a.v, b.v)); }                                             \
    static Vec mul(Vec a, Vec b) { return make(_mm512_mul_ps(a.v, b.v)); }                                             \
    static Vec div(Vec a, Vec b) { return make(_mm512_div_ps(a.v, b.v)); }                                             \
    static Vec min(Vec a, Vec b) { return make(_mm512_min_ps(a.v, b.v)); }                                             \
    static Vec max(Vec a, Vec b) { return make(_mm512_max_ps(a.v, b.v)); }                                             \
    static Vec where_positive(Vec a, Vec b) {                                                                          \
        return make(_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, _mm512_setzero_ps(), _CMP_GT_OQ), b.v));               \
    }                                                                                                                  \
    static void reduce4(Vec a, Vec b, Vec c, Vec d, float * out) {                                                     \
        out[0] = _mm512_reduce_add_ps(a.v);                                                                            \
        out[1] = _mm512_reduce_add_ps(b.v);                                                                            \
        out[2] = _mm512_reduce_add_ps(c.v);                                                                            \
        out[3] = _mm512_reduce_add_ps(d.v);                                                                            \
    }                                                                                                                  \
    static Vec from_fp8(const uint8_t * p) {                                                                           \
        const __m512i bits = _mm512_slli_epi32(sign_extend(p), 20);                                                    \
        return make(_mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(int(0x87FFFFFFu)))));                 \
    }                                                                                                                  \
    static Vec from_i8(const uint8_t * p) { return make(_mm512_cvtepi32_ps(sign_extend(p))); }                         \
    static Vec from_bf16(const uint8_t * p) {                                                                          \
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));          \
        return make(_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)));                                                 \
    }                                                                                                                  \
    static Vec from_f16(const uint8_t * p) {                                                                           \
        return make(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))));                        \
    }                                                                                                                  \
    /* As in avx2.cpp; scaling by 2^n overflows to infinity and underflows to 0 by itself. */                          \
    static Vec exp(Vec a) {                                                                                            \
        const __m512 x = _mm512_max_ps(_mm512_set1_ps(-104.0f), _mm512_min_ps(_mm512_set1_ps(89.0f), a.v));            \
        const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);                       \
        __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);                                               \
        r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);                                                   \
        __m512 p = _mm512_set1_ps(1.0f / 5040);                                                                        \
        const float series[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};                        \
        for (const float c : series) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));                                     \
        return make(_mm512_scalef_ps(p, n));                                                                           \
    }

inline bool has_fp8_nan_512(const uint8_t * codes, size_t n) {
    const __m512i magnitude = _mm512_set1_epi8(0x7F);
    bool any = false;
    size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        const __m512i c = _mm512_loadu_si512(codes + i);
        any |= _mm512_cmpeq_epi8_mask(_mm512_and_si512(c, magnitude), magnitude) != 0;
    }
    for (; i < n; i++) any = any || (codes[i] & 0x7F) == 0x7F;
    return any;
}

// The order in which a decoder wants a group of 64 activations, for permutes of two registers each: lane i of part q is
// activation position(16 q + i).
struct GroupOrder {
    alignas(64) int index[64];  // within 32 activations
    uint16_t        upper[4];   // lanes that come from the upper 32
};

constexpr GroupOrder make_order(int (*position)(int)) {
    GroupOrder o{};
    for (int i = 0; i < 64; i++) {
        o.index[i] = position(i) % 32;
        if (position(i) >= 32) o.upper[i / 16] = uint16_t(o.upper[i / 16] | 1 << i % 16);
    }
    return o;
}

// Part q of a group of 64 activations, times scale.
inline __m512 ordered_part(const float * x, const GroupOrder & order, int q, __m512 scale) {
    const __m512i index = _mm512_load_si512(order.index + 16 * q);
    const __m512 lower = _mm512_permutex2var_ps(_mm512_loadu_ps(x), index, _mm512_loadu_ps(x + 16));
    const __m512 upper = _mm512_permutex2var_ps(_mm512_loadu_ps(x + 32), index, _mm512_loadu_ps(x + 48));
    return _mm512_mul_ps(_mm512_mask_blend_ps(order.upper[q], lower, upper), scale);
}

// A group in four parts of 16 floats: what two of the four files share.
inline void store_x_f32(const float * x, const GroupOrder & order, float scale, uint8_t * out) {
    const __m512 s = _mm512_set1_ps(scale);
    for (int q = 0; q < 4; q++) _mm512_storeu_ps(reinterpret_cast<float *>(out) + 16 * q, ordered_part(x, order, q, s));
}

inline __m512 multiply_f32(__m512 part, const uint8_t * x, __m512 acc) {
    return _mm512_fmadd_ps(part, _mm512_loadu_ps(reinterpret_cast<const float *>(x)), acc);
}

#ifdef __AVX512BF16__
// The same in two parts of 32 BF16, rounded to nearest even.
inline void store_x_bf16(const float * x, const GroupOrder & order, float scale, uint8_t * out) {
    const __m512 s = _mm512_set1_ps(scale);
    for (int q = 0; q < 4; q++) {  // the instruction that converts two registers at once is wrong in emulators
        const __m256bh h = _mm512_cvtneps_pbh(ordered_part(x, order, q, s));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(out + 32 * q), (__m256i) h);
    }
}

inline __m512 multiply_bf16(__m512i part, const uint8_t * x, __m512 acc) {
    return _mm512_dpbf16_ps(acc, (__m512bh) part, (__m512bh) _mm512_loadu_si512(x));
}
#endif

// BF16 of the 128 magnitudes of E4M3, low bytes then high bytes, as two-register tables for byte permutes.
struct Bf16Tables {
    alignas(64) uint8_t low[128];
    alignas(64) uint8_t high[128];
};

constexpr Bf16Tables make_bf16_tables() {
    Bf16Tables t{};
    for (int code = 0; code < 128; code++) {
        int exponent = code >> 3;
        int mantissa = code & 7;
        if (exponent == 0 && mantissa != 0) {  // subnormal: shift the leading one out
            exponent = 1;
            while (!(mantissa & 8)) {
                mantissa <<= 1;
                exponent--;
            }
            mantissa &= 7;
            const int bits = (exponent + 120) << 7 | mantissa << 4;
            t.low[code]  = uint8_t(bits & 255);
            t.high[code] = uint8_t(bits >> 8);
        } else if (exponent != 0) {
            const int bits = (exponent + 120) << 7 | mantissa << 4;
            t.low[code]  = uint8_t(bits & 255);
            t.high[code] = uint8_t(bits >> 8);
        }
    }
    return t;
}

}  // namespace
