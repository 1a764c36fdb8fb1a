// AVX-512 with VBMI and BF16 and GFNI (Sapphire Rapids and later): E4M3 to BF16 lanes, vdpbf16ps.
// Weights are exact; activations, times their block's scale, are rounded to BF16 (to nearest even), as the instruction
// wants them. Order: a lane adds the products of two neighbours in BF16 pairs (codes 2i and 2i + 1), lanes as in body_fp8.h.
#include "quants.h"

#include "vec_avx512.h"

namespace hybrid_moe {
namespace {

constexpr Bf16Tables tables = make_bf16_tables();

// Rows of an 8x8 bit matrix, bit b of the result being the parity of row b and the code; row 0 is the top byte.
constexpr long long matrix(int b7, int b6, int b5, int b4, int b3, int b2, int b1, int b0) {
    const int rows[8] = {b0, b1, b2, b3, b4, b5, b6, b7};
    unsigned long long m = 0;
    for (int b = 0; b < 8; b++) m |= (unsigned long long) rows[b] << (8 * (7 - b));
    return (long long) m;
}
// low: e0 m2 m1 m0 0 0 0 0.  high: 0 e3 !e3 !e3 !e3 !e3 e2 e1 (exponent + 120, halved); the 0x3C above inverts.
constexpr long long low_matrix  = matrix(0x08, 0x04, 0x02, 0x01, 0, 0, 0, 0);
constexpr long long high_matrix = matrix(0, 0x40, 0x40, 0x40, 0x40, 0x40, 0x20, 0x10);

constexpr GroupOrder order = make_order([](int i) { return i % 32 / 8 * 16 + i / 32 * 8 + i % 8; });

struct Vec : Vec512 {
    HYBRID_MOE_AVX512_WORDS

    static constexpr int   fp8_group   = 64;
    static constexpr int   fp8_parts   = 2;
    static constexpr int   fp8_x_bytes = 128;
    static constexpr float fp8_y_unit  = 1.0f;
    struct Fp8 { __m512i part[2]; };
    // Normal codes by two bit-matrix products (a byte permute of two registers is three operations on Intel): the BF16
    // bytes are affine in the code's bits. Exponent 0, zero and subnormals, comes from a small table under a mask.
    static Fp8 fp8_decode(const uint8_t * p) {
        const __m512i sign = _mm512_set1_epi8(char(0x80));
        const __m512i v = _mm512_loadu_si512(p);
        const __mmask64 small = _mm512_testn_epi8_mask(v, _mm512_set1_epi8(0x78));
        __m512i low  = _mm512_gf2p8affine_epi64_epi8(v, _mm512_set1_epi64(low_matrix), 0);
        __m512i high = _mm512_gf2p8affine_epi64_epi8(v, _mm512_set1_epi64(high_matrix), 0x3C);
        low  = _mm512_mask_permutexvar_epi8(low, small, v, _mm512_load_si512(tables.low));
        high = _mm512_mask_permutexvar_epi8(high, small, v, _mm512_load_si512(tables.high));
        high = _mm512_ternarylogic_epi32(high, v, sign, 0xF8);  // high | (v & sign)
        return {{_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)}};
    }
    static void fp8_store_x(const float * x, float scale, uint8_t * out) { store_x_bf16(x, order, scale, out); }
    static Vec fp8_multiply(__m512i part, const uint8_t * x, Vec acc) { return make(multiply_bf16(part, x, acc.v)); }
};

}  // namespace

#include "body.h"
#include "body_fp8.h"
#include "panel_avx.h"
#include "body_gemm.h"

extern const Kernels kernels_avx512_gfni;
const Kernels kernels_avx512_gfni = {"avx512_gfni", dot_any, gemm, expand, activate, accumulate, multiply_add, has_fp8_nan_512};

}  // namespace hybrid_moe
