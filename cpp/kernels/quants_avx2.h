// Words that the AVX2 files for quantised types share. Intrinsics only, no STL.
#pragma once

#include "quants.h"

#include <immintrin.h>

namespace hybrid_moe {
namespace {

inline __m256i load32(const void * p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
inline __m128i load16(const void * p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }

inline uint64_t u16_at(const uint8_t * p) {
    uint16_t h;
    __builtin_memcpy(&h, p, sizeof h);
    return h;
}

inline float f16_at(const uint8_t * p) { return _cvtsh_ss(uint16_t(u16_at(p))); }

// Scales of eight blocks, `Stride` bytes apart. Put together in general registers: the vector units are the bottleneck.
template <int Stride> inline __m256 f16_of_blocks(const uint8_t * p) {
    const uint64_t a = u16_at(p) | u16_at(p + Stride) << 16 | u16_at(p + 2 * Stride) << 32 | u16_at(p + 3 * Stride) << 48;
    const uint8_t * q = p + 4 * Stride;
    const uint64_t b = u16_at(q) | u16_at(q + Stride) << 16 | u16_at(q + 2 * Stride) << 32 | u16_at(q + 3 * Stride) << 48;
    return _mm256_cvtph_ps(_mm_set_epi64x(int64_t(b), int64_t(a)));
}

template <int Stride> inline __m128i bytes_of_blocks(const uint8_t * p) {
    uint64_t all = 0;
    for (int b = 0; b < 8; b++) all |= uint64_t(p[b * Stride]) << (8 * b);
    return _mm_cvtsi64_si128(int64_t(all));
}

// half_e8m0_bits of eight codes: the maximum picks its first case for 0 and 1, its second for the others.
inline __m256 half_e8m0(__m128i codes) {
    const __m256i e = _mm256_cvtepu8_epi32(codes);
    const __m256i one = _mm256_set1_epi32(1);
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_slli_epi32(_mm256_sub_epi32(e, one), 23),
                                                _mm256_slli_epi32(_mm256_add_epi32(e, one), 21)));
}

// Halves of the four scales of two NVFP4 blocks. The bits of E4M3 as the top of a float are its value x 2^-120; the product
// is exact, subnormals included. 0x7F counts as 0.
inline __m256 half_ue4m3(const uint8_t * p, const uint8_t * q) {
    uint32_t a, b;
    __builtin_memcpy(&a, p, sizeof a);
    __builtin_memcpy(&b, q, sizeof b);
    const __m256i codes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(uint64_t(b) << 32 | a)));
    const __m256i nan = _mm256_cmpeq_epi32(codes, _mm256_set1_epi32(0x7F));
    const __m256i bits = _mm256_slli_epi32(_mm256_and_si256(_mm256_andnot_si256(nan, codes), _mm256_set1_epi32(0x7F)), 20);
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p119f));
}

// 16 bytes to 32 nibbles: low ones in the low half, high ones in the high half.
inline __m256i nibbles(const uint8_t * p) {
    const __m256i shifts = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
    const __m256i both = _mm256_broadcastsi128_si256(load16(p));
    return _mm256_and_si256(_mm256_srlv_epi32(both, shifts), _mm256_set1_epi8(15));
}

inline __m256i low_nibbles(__m256i v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline __m256i high_nibbles(__m256i v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }

// A table of sixteen bytes, looked up by nibbles.
inline __m256i look_up(const int8_t * table, __m256i nibble) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load16(table)), nibble);
}

// The eight scales of an IQ4_XS block, offset removed.
inline __m128i iq4_xs_scales(const uint8_t * p) {  // p: the block
    int32_t l;
    __builtin_memcpy(&l, p + 4, sizeof l);
    const __m128i low_bytes = _mm_cvtsi32_si128(l);
    const __m128i low = _mm_and_si128(_mm_unpacklo_epi8(low_bytes, _mm_srli_epi16(low_bytes, 4)), _mm_set1_epi8(15));
    const __m256i h = _mm256_srlv_epi32(_mm256_set1_epi32(int32_t(u16_at(p + 2))), _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
    const __m256i high = _mm256_slli_epi32(_mm256_and_si256(h, _mm256_set1_epi32(3)), 4);
    const __m128i high16 = _mm_packs_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    return _mm_sub_epi16(_mm_or_si128(_mm_cvtepu8_epi16(low), high16), _mm_set1_epi16(32));  // eight 16-bit numbers
}

inline float sum_of(__m256 v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two  = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline __m128 sums_of(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

}  // namespace
}  // namespace hybrid_moe
