// The CUDA kernel's arithmetic and indices on the CPU, the grid as a loop: every code times many scales against float64, and
// ragged matrices in exact memory (AddressSanitizer sees a byte read too many) between guards.
#include "cuda/fp8_expand_body.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

namespace hybrid_moe {
#include "kernels/numbers.h"
}
using namespace hybrid_moe;

namespace {

void fail(const char * what, double a = 0, double b = 0, double c = 0) {
    printf("%s (%.9g, %.9g, %.9g)\n", what, a, b, c);
    exit(1);
}

// The definition of E4M3FN, in float64.
double value_of(uint32_t code) {
    const int exponent = int(code >> 3 & 15), mantissa = int(code & 7);
    if (exponent == 15 && mantissa == 7) return NAN;
    const double magnitude = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    return code & 0x80 ? -magnitude : magnitude;
}

// x rounded to `digits` significant bits, fewer below 2^lowest, infinite from 2^highest on; ties to even.
double rounded(double x, int digits, int lowest, int highest) {
    if (x == 0 || !std::isfinite(x)) return x;
    const int exponent = std::max(std::ilogb(x), lowest);
    const double unit = std::ldexp(1, exponent - digits + 1);
    const double r = std::nearbyint(x / unit) * unit;
    return std::fabs(r) >= std::ldexp(1, highest) ? std::copysign(INFINITY, x) : r;
}

double to_float(double x) { return rounded(x, 24, -126, 128); }
double to_half(double x, HalfType type) {
    return type == HalfType::bf16 ? rounded(x, 8, -126, 128) : rounded(x, 11, -14, 16);
}

double value_of_half(uint32_t bits, HalfType type) {
    return type == HalfType::bf16 ? f32_of_bf16(uint16_t(bits)) : f32_of_f16(uint16_t(bits));
}

bool same(double a, double b) { return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b)); }

std::vector<float> scales() {
    std::vector<float> all = {0.0f, -0.0f, 1.0f, -1.0f, INFINITY, -INFINITY, NAN, 256.0f, 0x1p127f, 0x1.fffffep127f, 0x1p-126f,
                              0x1p-149f, 0x1.8p-140f, 3.0e38f, 146.2f, 146.3f, 65520.0f / 448, 65519.0f / 448};
    for (int e = -149; e < 128; e++) {
        all.push_back(std::ldexp(1.0f, e));
        all.push_back(-std::ldexp(1.7f, e));
    }
    std::mt19937 random(5);
    for (int i = 0; i < 4000; i++) all.push_back(float_of(uint32_t(random())));  // NaN and infinity among them
    for (int i = 0; i < 4000; i++) {                                            // as checkpoints have them
        all.push_back(std::ldexp(1.0f + float(random()) / 4294967296.0f, -int(random() % 20)));
    }
    // Products whose float lies exactly half-way between two BF16: scale = (odd multiple of 2^-8) / (code's mantissa).
    for (int i = 0; i < 500; i++) {
        for (int m = 8; m < 16; m++) all.push_back(float((256.0 + double(random() % 256) + 0.5) / m));
    }
    return all;
}

void every_code(HalfType type) {
    long twice = 0, n = 0;
    for (const float scale : scales()) {
        for (uint32_t code = 0; code < 256; code++) {
            const double exact = value_of(code) * double(scale);  // 4 + 24 bits: no rounding in float64
            const uint32_t bits = type == HalfType::bf16 ? half_bits_of<HalfType::bf16>(code, scale)
                                                         : half_bits_of<HalfType::f16>(code, scale);
            const double got = value_of_half(bits, type);
            if (bits > 0xFFFF) fail("more than 16 bits", code, scale, bits);
            if (!same(got, to_half(to_float(exact), type))) fail("wrong value", code, scale, got);
            if (std::isnan(got) && bits != (type == HalfType::bf16 ? 0x7FC0u : 0x7E00u)) fail("another NaN", code, scale, bits);
            if (std::isnan(value_of(code)) && !std::isnan(got)) fail("a NaN code is a number", code, scale, got);
            if (!same(fp8_times_scale(code, 1.0f), f32_of_fp8(uint8_t(code)))) fail("not the CPU kernels' value", code);
            if (std::isnan(exact)) continue;
            // Rounding to float first matters at ties only, and then by one unit.
            n++;
            const double once = to_half(exact, type);
            if (same(got, once)) continue;
            twice++;
            const double unit = std::fabs(exact) * (type == HalfType::bf16 ? 0x1p-7 : 0x1p-10) +
                                (type == HalfType::bf16 ? 0x1p-133 : 0x1p-24);
            const double largest = type == HalfType::bf16 ? 0x1.FEp127 : 65504;
            const double finite = std::isinf(got) ? std::copysign(largest, got) : got;
            if (!(std::fabs(finite - exact) <= unit)) fail("far from the exact product", code, scale, got);
        }
    }
    const char * const name = type == HalfType::bf16 ? "BF16" : "F16";
    printf("%s: %ld products, %ld of them rounded otherwise than in one step\n", name, n, twice);
    if (twice * 100 > n) fail("rounding twice changes too many products", double(twice), double(n));
}

template <HalfType T> void run_grid(const Fp8Job & job) {
    const uint64_t n_threads = blocks_of_grid(job) * threads_per_block;
    for (uint64_t i_thread = 0; i_thread < n_threads; i_thread++) expand_by_thread<T>(job, i_thread);
}

struct Shape { uint64_t n_rows, k, block_rows, block_k; };

// codes_at, out_at: bytes by which the matrices miss an alignment of 16.
template <HalfType T> void one_matrix(const Shape & s, size_t codes_at, size_t out_at, std::mt19937 & random) {
    constexpr size_t guard = 32;
    const uint64_t n = s.n_rows * s.k, n_k_blocks = (s.k + s.block_k - 1) / s.block_k;
    const uint64_t n_scales = (s.n_rows + s.block_rows - 1) / s.block_rows * n_k_blocks;
    // malloc gives multiples of 16; sizes are exact, so that reading beyond is seen.
    std::unique_ptr<uint8_t, void (*)(void *)> codes(static_cast<uint8_t *>(malloc(codes_at + n)), free);
    std::vector<float> scale(n_scales);
    std::vector<uint8_t> out(out_at + n * 2 + 2 * guard + 16, 0xA5);
    uint8_t * first = out.data() + guard;
    first += (16 - uintptr_t(first) % 16) % 16 + out_at;
    for (uint64_t i = 0; i < n; i++) codes.get()[codes_at + i] = uint8_t(random());
    for (float & f : scale) f = std::ldexp(1.0f + float(random() % 1000) / 1000, -int(random() % 12));
    const Fp8Job job = {codes.get() + codes_at, scale.data(), reinterpret_cast<uint16_t *>(first), s.n_rows, s.k, s.block_rows,
                        s.block_k, n_k_blocks};
    run_grid<T>(job);
    for (uint64_t row = 0; row < s.n_rows; row++) {
        for (uint64_t i = 0; i < s.k; i++) {
            const float by = scale[row / s.block_rows * n_k_blocks + i / s.block_k];
            const double expected = to_half(to_float(value_of(job.codes[row * s.k + i]) * double(by)), T);
            const double got = value_of_half(job.out[row * s.k + i], T);
            if (!same(got, expected)) fail("wrong element", double(s.n_rows), double(s.k), double(i));
        }
    }
    for (const uint8_t * p = out.data(); p < out.data() + out.size(); p++) {
        const bool outside = p < first || p >= first + n * 2;
        if (outside && *p != 0xA5) fail("wrote outside", double(s.n_rows), double(s.k), double(p - first));
    }
}

void ragged_matrices() {
    std::mt19937 random(7);
    int n = 0;
    for (const uint64_t n_rows : {1, 2, 3, 5, 129}) {
        for (const uint64_t k : {1, 2, 7, 15, 16, 17, 31, 32, 33, 100, 128, 129, 256, 300}) {
            const auto cut = [&](uint64_t block_k) { return std::min(k, block_k); };
            const Shape shapes[] = {{n_rows, k, 128, cut(128)}, {n_rows, k, 64, cut(48)}, {n_rows, k, 3, cut(5)},
                                    {n_rows, k, n_rows, k},     {n_rows, k, 1, cut(32)},  {n_rows, k, 1, k},
                                    {n_rows, k, 2, 1}};
            for (const Shape & shape : shapes) {
                for (const size_t codes_at : {0, 1, 8}) {
                    for (const size_t out_at : {0, 2, 8}) {
                        one_matrix<HalfType::bf16>(shape, codes_at, out_at, random);
                        one_matrix<HalfType::f16>(shape, codes_at, out_at, random);
                        n += 2;
                    }
                }
            }
        }
    }
    printf("%d ragged matrices\n", n);
}

// A matrix of more than 2^32 elements: threads at its far end, with memory for their 64 elements only.
void beyond_32_bits() {
    constexpr uint64_t n_rows = 70001, k = 70000, width = 64;
    const uint64_t row = 69998, from = row * k - 32;  // a multiple of 16; the second half is in the next row
    static_assert((69998 * k - 32) % codes_per_thread == 0);
    alignas(16) static uint8_t codes[width];
    alignas(16) static uint16_t out[width];
    const uint64_t n_k_blocks = (k + 127) / 128;
    std::vector<float> scale((n_rows + 127) / 128 * n_k_blocks, 1.0f);
    scale[(row - 1) / 128 * n_k_blocks + (k - 32) / 128] = 2.0f;
    scale[row / 128 * n_k_blocks] = 4.0f;
    for (uint64_t i = 0; i < width; i++) codes[i] = uint8_t(i + 1);
    const Fp8Job job = {reinterpret_cast<const uint8_t *>(uintptr_t(codes) - from), scale.data(),
                        reinterpret_cast<uint16_t *>(uintptr_t(out) - from * 2), n_rows, k, 128, 128, n_k_blocks};
    for (uint64_t t = 0; t < width / codes_per_thread; t++) expand_by_thread<HalfType::bf16>(job, from / codes_per_thread + t);
    for (uint64_t i = 0; i < width; i++) {
        if (f32_of_bf16(out[i]) != float(value_of(codes[i])) * (i < 32 ? 2.0f : 4.0f)) fail("wrong far element", double(i));
    }
    if (blocks_of_grid(job) != (n_rows * k + 4095) / 4096) fail("wrong grid");
}

}  // namespace

int main() {
    every_code(HalfType::bf16);
    every_code(HalfType::f16);
    ragged_matrices();
    beyond_32_bits();
    puts("ok");
    return 0;
}
