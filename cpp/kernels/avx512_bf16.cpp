// AVX-512 with VBMI and BF16 (Zen 4 and later): E4M3 to BF16 lanes, vdpbf16ps.
// Weights are exact; activations, times their block's scale, are rounded to BF16 (to nearest even), as the instruction
// wants them. Order: a lane adds the products of two neighbours in BF16 pairs (codes 4i and 4i + 2, or 4i + 1 and 4i + 3), lanes as in body_fp8.h.
#include "quants.h"

#include "vec_avx512.h"

namespace hybrid_moe {
namespace {

constexpr Bf16Tables tables = make_bf16_tables();

constexpr GroupOrder order = make_order([](int i) { return i < 32 ? 2 * i : 2 * (i - 32) + 1; });

struct Vec : Vec512 {
    HYBRID_MOE_AVX512_WORDS

    static constexpr int   fp8_group   = 64;
    static constexpr int   fp8_parts   = 2;
    static constexpr int   fp8_x_bytes = 128;
    static constexpr float fp8_y_unit  = 1.0f;
    struct Fp8 { __m512i part[2]; };
    // Even and odd codes of 16-bit lanes become the two parts by shifts: on Zen 4 those run beside the permutes, unpacking
    // does not (static estimate 6.7 cycles per 64 weights, 7.1 with unpacking).
    static Fp8 fp8_decode(const uint8_t * p) {
        const __m512i sign = _mm512_set1_epi8(char(0x80));
        const __m512i upper = _mm512_set1_epi16(short(0xFF00));
        const __m512i v    = _mm512_loadu_si512(p);
        const __m512i low  = _mm512_permutex2var_epi8(_mm512_load_si512(tables.low), v, _mm512_load_si512(tables.low + 64));
        __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(tables.high), v, _mm512_load_si512(tables.high + 64));
        high = _mm512_ternarylogic_epi32(high, v, sign, 0xF8);  // high | (v & sign)
        return {{_mm512_ternarylogic_epi32(upper, _mm512_slli_epi16(high, 8), low, 0xCA),    // upper ? .. : low
                 _mm512_ternarylogic_epi32(upper, high, _mm512_srli_epi16(low, 8), 0xCA)}};
    }
    static void fp8_store_x(const float * x, float scale, uint8_t * out) { store_x_bf16(x, order, scale, out); }
    static Vec fp8_multiply(__m512i part, const uint8_t * x, Vec acc) { return make(multiply_bf16(part, x, acc.v)); }
};

}  // namespace

#include "body.h"
#include "body_fp8.h"
#include "panel_avx.h"
#include "body_gemm.h"

extern const Kernels kernels_avx512_bf16;
const Kernels kernels_avx512_bf16 = {"avx512_bf16", dot_any, gemm, expand, activate, accumulate, multiply_add, has_fp8_nan_512};

}  // namespace hybrid_moe
