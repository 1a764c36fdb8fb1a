// Every kernel table that this CPU runs against double precision, on small shapes: for emulated CPUs, where Python is too
// slow. Arguments: names that must be among them. Prints a line per table, exits 0 when all agree.
#include "kernels/quants.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using namespace hybrid_moe;

namespace {

uint32_t state = 12345;
uint32_t random_bits() { return state = state * 1664525u + 1013904223u; }
float random_float() { return (float(random_bits() >> 8) / float(1 << 24) - 0.5f) * 2.0f; }

double value_of_fp8(uint8_t code) {
    const int e = code >> 3 & 15, m = code & 7;
    const double v = e ? std::ldexp(1.0 + m / 8.0, e - 7) : std::ldexp(m / 8.0, -6);
    return code & 0x80 ? -v : v;
}

double value_of_f16(uint16_t h) {
    const int e = h >> 10 & 31, m = h & 1023;
    const double v = e ? std::ldexp(1.0 + m / 1024.0, e - 15) : std::ldexp(m / 1024.0, -14);
    return h & 0x8000 ? -v : v;
}

struct Case {
    ExpertMatrix         e{};
    std::vector<uint8_t> bytes;
    std::vector<float>   scale;
    std::vector<double>  values;  // [n_rows][k]
};

// Where the F16 numbers of a block of a quantised type lie that scale all of it, -1 for none.
struct ScalesAt { int first, second; };
ScalesAt scales_at(WeightType type) {
    if (type == WeightType::q4_k || type == WeightType::q5_k) return {0, 2};
    if (type == WeightType::q6_k) return {208, -1};
    return type == WeightType::mxfp4 || type == WeightType::nvfp4 ? ScalesAt{-1, -1} : ScalesAt{0, -1};
}

// Random blocks; their values are those of the scalar decoder, which test_kernels.py holds against the definitions.
void make_quantised(Case & c, uint8_t * w) {
    const size_t group = group_bytes(c.e.type);
    for (size_t i = 0; i < c.e.row_bytes * size_t(c.e.n_rows); i++) w[i] = uint8_t(random_bits() >> 24);
    for (uint8_t * block = w; block < w + c.e.row_bytes * size_t(c.e.n_rows); block += group) {
        const ScalesAt at = scales_at(c.e.type);
        for (const int i : {at.first, at.second}) {
            const uint16_t d = uint16_t(0x2000 + (random_bits() >> 24));
            if (i >= 0) memcpy(block + i, &d, 2);
        }
        if (c.e.type == WeightType::mxfp4) block[0] = uint8_t(120 + block[0] % 8);
        for (int i = 0; c.e.type == WeightType::nvfp4 && i < 4; i++) block[i] &= 0x3F;
    }
    std::vector<float> row(size_t(c.e.k));
    for (int64_t r = 0; r < c.e.n_rows; r++) {
        expand_quants_scalar(c.e, r, 0, c.e.k, row.data());
        c.values.insert(c.values.end(), row.begin(), row.end());
    }
}

Case make(WeightType type, int64_t n_rows, int64_t wanted_k, int64_t block_rows, int64_t block_k) {
    Case c;
    const int64_t k = (wanted_k + group_len(type) - 1) / group_len(type) * group_len(type);
    c.e.type = type;
    c.e.row_bytes = size_t(k / group_len(type)) * group_bytes(type);
    c.e.n_rows = n_rows;
    c.e.k = k;
    c.bytes.resize(c.e.row_bytes * size_t(n_rows) + 1);
    c.e.w = c.bytes.data() + 1;  // unaligned
    uint8_t * w = c.bytes.data() + 1;
    if (type == WeightType::fp8_e4m3) {
        c.e.block_rows = block_rows;
        c.e.block_k = block_k;
        const int64_t grid = (n_rows + block_rows - 1) / block_rows * c.e.n_k_blocks();
        for (int64_t i = 0; i < grid; i++) c.scale.push_back(0.01f + std::fabs(random_float()));
        c.e.scale = c.scale.data();
    }
    if (is_quantised(type)) {
        make_quantised(c, w);
        return c;
    }
    for (int64_t r = 0; r < n_rows; r++) {
        for (int64_t i = 0; i < k; i++) {
            uint8_t * row = w + size_t(r) * c.e.row_bytes;
            double v = 0;
            if (type == WeightType::fp8_e4m3) {
                uint8_t code = uint8_t(r == 0 ? i : random_bits() >> 24);  // the first row has every code
                if ((code & 0x7F) == 0x7F) code = 3;
                row[i] = code;
                v = value_of_fp8(code) * double(c.e.row_scale(r)[i / block_k]);
            } else if (type == WeightType::f32) {
                const float f = random_float();
                memcpy(row + 4 * i, &f, 4);
                v = f;
            } else if (type == WeightType::bf16) {
                const float f = random_float();
                uint32_t bits;
                memcpy(&bits, &f, 4);
                bits &= 0xFFFF0000u;
                memcpy(row + 2 * i, reinterpret_cast<uint8_t *>(&bits) + 2, 2);
                float rounded;
                memcpy(&rounded, &bits, 4);
                v = rounded;
            } else {
                const uint16_t h = uint16_t(random_bits() >> 16) & 0xBFFF;
                memcpy(row + 2 * i, &h, 2);
                v = value_of_f16(h);
            }
            c.values.push_back(v);
        }
    }
    return c;
}

// How the table rounds activations, relative to the largest of a block: BF16 for FP8 products, int8 for quantised types.
enum class Rounding { none, bf16, int8 };

bool check(const Kernels & kernels, const Case & c, int64_t m, bool gemm, Rounding rounding) {
    const int64_t k = c.e.k, n = c.e.n_rows;
    std::vector<float> x(size_t(m * k)), y(size_t(m * n), NAN);
    for (float & f : x) f = random_float();
    std::vector<const float *> xs;
    std::vector<float *> ys;
    for (int64_t j = 0; j < m; j++) {
        xs.push_back(x.data() + j * k);
        ys.push_back(y.data() + j * n);
    }
    float * panel = static_cast<float *>(aligned_alloc(64, gemm_scratch_bytes));
    const TokenRows rows = {xs.data(), ys.data(), m};
    if (gemm) kernels.gemm(c.e, 0, n, rows, panel);
    else kernels.dot(c.e, 0, n, rows);
    free(panel);
    for (int64_t j = 0; j < m; j++) {
        for (int64_t r = 0; r < n; r++) {
            double exact = 0, sum = 0;
            for (int64_t i = 0; i < k; i++) {
                exact += c.values[size_t(r * k + i)] * double(x[size_t(j * k + i)]);
                sum += std::fabs(c.values[size_t(r * k + i)] * double(x[size_t(j * k + i)]));
            }
            double limit = sum * (rounding == Rounding::bf16 ? 0x1p-8 : 0x1p-20) + 1e-30;
            if (rounding == Rounding::int8) {  // |x| <= 1, so half a step is at most 0.5 / 127; F16 scales add 2^-11 of x
                for (int64_t i = 0; i < k; i++) limit += std::fabs(c.values[size_t(r * k + i)]) * (0.51 / 127 + 0x1p-11);
            }
            if (!(std::fabs(double(y[size_t(j * n + r)]) - exact) <= limit)) {
                printf("%s: %s %s rows %lld k %lld m %lld: row %lld is %g, not %g\n", kernels.name, name_of(c.e.type), gemm ? "gemm" : "dot",
                       (long long) n, (long long) k, (long long) m, (long long) r, double(y[size_t(j * n + r)]), exact);
                return false;
            }
        }
    }
    return true;
}

bool check_activations(const Kernels & kernels) {
    for (int kind = Activation::silu; kind <= Activation::swiglu_limited; kind++) {
        const Activation a = {Activation::Kind(kind), 1.702f, 2.0f};
        float gate[37], up[37], out[37];
        for (int i = 0; i < 37; i++) {
            gate[i] = random_float() * (i < 20 ? 5.0f : 120.0f);
            up[i] = random_float() * 5.0f;
        }
        kernels.activate(a, gate, up, 37, out);
        for (int i = 0; i < 37; i++) {
            const double g = gate[i], u = up[i], limit = 2.0;
            const auto clamp = [&](double v) { return v < -limit ? -limit : v > limit ? limit : v; };
            const auto sig = [](double v, double alpha) { return v / (1 + std::exp(-alpha * v)); };
            const auto gelu = [](double v) { return 0.5 * v * (1 + std::tanh(0.79788456080286536 * v * (1 + 0.044715 * v * v))); };
            double exact = 0;
            switch (a.kind) {
                case Activation::silu: exact = sig(u, 1); break;
                case Activation::gelu: exact = gelu(u); break;
                case Activation::relu: exact = u > 0 ? u : 0; break;
                case Activation::relu_squared: exact = u > 0 ? u * u : 0; break;
                case Activation::swiglu: exact = sig(g, 1) * u; break;
                case Activation::geglu: exact = gelu(g) * u; break;
                case Activation::reglu: exact = (g > 0 ? g : 0) * u; break;
                case Activation::swiglu_oai: exact = sig(g < limit ? g : limit, a.alpha) * (clamp(u) + 1); break;
                case Activation::swiglu_clamp: exact = sig(g < limit ? g : limit, 1) * clamp(u); break;
                case Activation::swiglu_limited: exact = std::fmin(sig(g, 1), limit) * clamp(u); break;
            }
            const bool by_f16 = a.kind == Activation::gelu || a.kind == Activation::geglu;
            if (!(std::fabs(out[i] - exact) <= (by_f16 ? 2e-3 : 2e-6) * std::fabs(exact) + (by_f16 ? 5e-3 : 1e-30))) {
                printf("%s: activation %d of %g, %g is %g, not %g\n", kernels.name, kind, g, u, double(out[i]), exact);
                return false;
            }
        }
    }
    return true;
}

bool check_all(const Kernels & kernels) {
    const bool bf16 = !strcmp(kernels.name, "avx512_bf16") || !strcmp(kernels.name, "avx512_gfni");
    const int64_t shapes[][4] = {{3, 64, 128, 128}, {17, 288, 128, 128}, {20, 160, 16, 48}, {5, 96, 1, 96}, {130, 256, 128, 128}};
    for (int type = 0; type < n_weight_types; type++) {
        for (const auto & s : shapes) {
            const Case c = make(WeightType(type), s[0], s[1], s[2], s[3]);
            for (int64_t m : {1, 2, 3, 4, 7}) {
                for (bool gemm : {false, true}) {
                    Rounding rounding = Rounding::none;
                    if (bf16 && WeightType(type) == WeightType::fp8_e4m3 && !gemm) rounding = Rounding::bf16;
                    if (strcmp(kernels.name, "scalar") && is_quantised(WeightType(type))) rounding = Rounding::int8;
                    if (!check(kernels, c, m, gemm, rounding)) return false;
                }
            }
        }
    }
    for (int code = 0; code < 256; code++) {
        uint8_t some[70];
        memset(some, 0x38, sizeof some);
        some[code % 70] = uint8_t(code);
        if (kernels.has_fp8_nan(some, sizeof some) != ((code & 0x7F) == 0x7F)) {
            printf("%s: has_fp8_nan of %d\n", kernels.name, code);
            return false;
        }
    }
    return check_activations(kernels);
}

}  // namespace

int main(int argc, char ** argv) {
    size_t n;
    const Implementation * all = implementations(&n);
    int n_failed = 0, n_missing = argc - 1;
    for (size_t i = 0; i < n; i++) {
        if (!all[i].runs_here()) continue;
        const bool good = check_all(*all[i].kernels);
        printf("%s %s\n", all[i].kernels->name, good ? "ok" : "FAILED");
        n_failed += !good;
        for (int a = 1; a < argc; a++) n_missing -= !strcmp(argv[a], all[i].kernels->name);
    }
    if (n_missing) printf("%d of the wanted tables do not run on this CPU\n", n_missing);
    return n_failed || n_missing ? 1 : 0;
}
