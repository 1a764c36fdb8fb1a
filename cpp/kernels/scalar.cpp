// The reference: one float at a time, on every CPU. Nothing here is fast.
#include "quants.h"

namespace hybrid_moe {
namespace {

struct Vec {
    static constexpr int   width    = 1;
    static constexpr float fp8_unit = 1.0f;  // from_fp8 returns the code's value itself
    static constexpr int   gemm_tokens = 6;
    float v;

    // Floating-point environment of a kernel call; plain floats need none.
    struct Environment { Environment() {} };

    static Vec zero() { return {0.0f}; }
    static Vec set1(float a) { return {a}; }
    static Vec load(const float * p) { Vec a; __builtin_memcpy(&a.v, p, sizeof a.v); return a; }
    void store(float * p) const { *p = v; }
    static Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
    static Vec add(Vec a, Vec b) { return {a.v + b.v}; }
    static Vec mul(Vec a, Vec b) { return {a.v * b.v}; }
    static Vec div(Vec a, Vec b) { return {a.v / b.v}; }
    static Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
    static Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
    static Vec where_positive(Vec a, Vec b) { return {a.v > 0.0f ? b.v : 0.0f}; }
    static Vec exp(Vec a) { return {__builtin_expf(a.v)}; }
    static inline uint16_t f16_bits(float f);
    static void reduce4(Vec a, Vec b, Vec c, Vec d, float * out) { out[0] = a.v; out[1] = b.v; out[2] = c.v; out[3] = d.v; }
    static inline float f16_scale(const uint8_t * p);
    static inline Vec from_fp8(const uint8_t * p);
    static inline Vec from_i8(const uint8_t * p) { return {float(int8_t(*p))}; }
    static inline Vec from_bf16(const uint8_t * p);
    static inline Vec from_f16(const uint8_t * p);
    static constexpr auto multiply_quants    = multiply_quants_scalar;
    static constexpr auto expand_quants = expand_quants_scalar;
};

}  // namespace

#include "body.h"

namespace {

inline void turn_floats(const float * in, int64_t rows, int64_t n, float * out) {
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = 0; i < n; i++) out[i * rows + r] = in[r * piece_k + i];
    }
}

template <WeightType T> bool turn_codes(const ExpertMatrix &, int64_t, int64_t, int64_t, int64_t, float *) { return false; }

}  // namespace

#include "body_gemm.h"

namespace {

float Vec::f16_scale(const uint8_t * p) { return f32_of_f16(load_u16(p)); }
Vec Vec::from_fp8(const uint8_t * p) { return {f32_of_fp8(*p)}; }
Vec Vec::from_bf16(const uint8_t * p) { return {f32_of_bf16(load_u16(p))}; }
Vec Vec::from_f16(const uint8_t * p) { return {f32_of_f16(load_u16(p))}; }

// Through the exponent at which F16 rounds: adding and subtracting a power of two drops the bits below it.
uint16_t Vec::f16_bits(float f) {
    uint32_t bits;
    __builtin_memcpy(&bits, &f, sizeof bits);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    bits &= 0x7FFFFFFF;
    if (bits > 0x7F800000) return uint16_t(sign | 0x7E00);
    if (bits >= 0x477FF000) return uint16_t(sign | 0x7C00);  // rounds to 65536 or more
    if (bits < 0x38800000) {                                  // subnormal half: units of 2^-24
        float magnitude;
        __builtin_memcpy(&magnitude, &bits, sizeof magnitude);
        return uint16_t(sign | uint16_t(__builtin_rintf(magnitude * 0x1p24f)));
    }
    bits += 0xFFF + (bits >> 13 & 1);
    return uint16_t(sign | ((bits >> 13) - (112 << 10)));
}

bool has_fp8_nan(const uint8_t * codes, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if ((codes[i] & 0x7F) == 0x7F) return true;
    }
    return false;
}

}  // namespace

extern const Kernels kernels_scalar;
const Kernels kernels_scalar = {"scalar", dot, gemm, expand, activate, accumulate, multiply_add, has_fp8_nan};

}  // namespace hybrid_moe
