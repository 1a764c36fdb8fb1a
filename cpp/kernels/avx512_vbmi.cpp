// AVX-512 with VBMI (Ice Lake): E4M3 to BF16 by byte permutes of two-register tables, widened to float. Exact, subnormals
// included.
#include "quants.h"

#include "vec_avx512.h"

namespace hybrid_moe {
namespace {

constexpr Bf16Tables tables = make_bf16_tables();

// Unpacking works inside 128-bit lanes: eight codes of each for a, the other eight for b, even ones first.
constexpr GroupOrder order = make_order([](int i) { return i % 16 / 4 * 16 + i / 32 * 8 + i % 4 * 2 + i / 16 % 2; });

struct Vec : Vec512 {
    HYBRID_MOE_AVX512_WORDS

    static constexpr int   fp8_group   = 64;
    static constexpr int   fp8_parts   = 4;
    static constexpr int   fp8_x_bytes = 256;
    static constexpr float fp8_y_unit  = 1.0f;
    struct Fp8 { __m512 part[4]; };
    static Fp8 fp8_decode(const uint8_t * p) {
        const __m512i sign = _mm512_set1_epi8(char(0x80));
        const __m512i top  = _mm512_set1_epi32(int(0xFFFF0000u));
        const __m512i v    = _mm512_loadu_si512(p);
        const __m512i low  = _mm512_permutex2var_epi8(_mm512_load_si512(tables.low), v, _mm512_load_si512(tables.low + 64));
        __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(tables.high), v, _mm512_load_si512(tables.high + 64));
        high = _mm512_ternarylogic_epi32(high, v, sign, 0xF8);  // high | (v & sign)
        const __m512i a = _mm512_unpacklo_epi8(low, high);
        const __m512i b = _mm512_unpackhi_epi8(low, high);
        return {{_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_and_si512(a, top)),
                 _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), _mm512_castsi512_ps(_mm512_and_si512(b, top))}};
    }
    static void fp8_store_x(const float * x, float scale, uint8_t * out) { store_x_f32(x, order, scale, out); }
    static Vec fp8_multiply(__m512 part, const uint8_t * x, Vec acc) { return make(multiply_f32(part, x, acc.v)); }
};

}  // namespace

#include "body.h"
#include "body_fp8.h"
#include "panel_avx.h"
#include "body_gemm.h"

extern const Kernels kernels_avx512_vbmi;
const Kernels kernels_avx512_vbmi = {"avx512_vbmi", dot_any, gemm, expand, activate, accumulate, multiply_add, has_fp8_nan_512};

}  // namespace hybrid_moe
