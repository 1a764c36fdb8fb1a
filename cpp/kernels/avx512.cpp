// AVX-512 F/BW/DQ/VL: FP8 by 16-bit lanes, as in avx2.cpp.
#include "quants.h"

#include "vec_avx512.h"

namespace hybrid_moe {
namespace {

constexpr GroupOrder order = make_order([](int i) { return 4 * (i % 16) + (i < 16 ? 1 : i < 32 ? 3 : i < 48 ? 0 : 2); });

struct Vec : Vec512 {
    HYBRID_MOE_AVX512_WORDS

    static constexpr int   fp8_group   = 64;
    static constexpr int   fp8_parts   = 4;
    static constexpr int   fp8_x_bytes = 256;
    static constexpr float fp8_y_unit  = 0x1p60f;
    struct Fp8 { __m512 part[4]; };
    static Fp8 fp8_decode(const uint8_t * p) {
        const __m512i keep = _mm512_set1_epi16(short(0x87F0));
        const __m512i top  = _mm512_set1_epi32(int(0xFFFF0000u));
        const __m512i v = _mm512_loadu_si512(p);
        const __m512i odd  = _mm512_and_si512(_mm512_srai_epi16(v, 4), keep);
        const __m512i even = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(v, 8), 4), keep);
        return {{_mm512_castsi512_ps(_mm512_slli_epi32(odd, 16)), _mm512_castsi512_ps(_mm512_and_si512(odd, top)),
                 _mm512_castsi512_ps(_mm512_slli_epi32(even, 16)), _mm512_castsi512_ps(_mm512_and_si512(even, top))}};
    }
    static void fp8_store_x(const float * x, float scale, uint8_t * out) { store_x_f32(x, order, scale * 0x1p60f, out); }
    static Vec fp8_multiply(__m512 part, const uint8_t * x, Vec acc) { return make(multiply_f32(part, x, acc.v)); }
};

}  // namespace

#include "body.h"
#include "body_fp8.h"
#include "panel_avx.h"
#include "body_gemm.h"

extern const Kernels kernels_avx512;
const Kernels kernels_avx512 = {"avx512", dot_any, gemm, expand, activate, accumulate, multiply_add, has_fp8_nan_512};

}  // namespace hybrid_moe
