// Every kernel table that this CPU runs against double precision, on small shapes: for emulated CPUs, where Python is too
// slow. Arguments: names that must be among them. Prints a line per table, exits 0 when all agree.
#include "kernels/kernels.h"

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

Case make(WeightType type, int64_t n_rows, int64_t k, int64_t block_rows, int64_t block_k) {
    Case c;
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
            } else if (type == WeightType::f16) {
                const uint16_t h = uint16_t(random_bits() >> 16) & 0xBFFF;
                memcpy(row + 2 * i, &h, 2);
                v = value_of_f16(h);
            } else {
                uint8_t * block = row + i / 32 * 34;
                if (i % 32 == 0) {
                    const uint16_t d = uint16_t(0x2000 + (random_bits() >> 24));
                    memcpy(block, &d, 2);
                }
                uint16_t d;
                memcpy(&d, block, 2);
                const int8_t q = int8_t(random_bits() >> 24);
                block[2 + i % 32] = uint8_t(q);
                v = value_of_f16(d) * q;
            }
            c.values.push_back(v);
        }
    }
    return c;
}

// bf16_x: the table rounds the activations of FP8 products to BF16.
bool check(const Kernels & kernels, const Case & c, int64_t m, bool gemm, bool bf16_x) {
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
            const double limit = sum * (bf16_x ? 0x1p-8 : 0x1p-20) + 1e-30;
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
                    if (!check(kernels, c, m, gemm, bf16 && type == int(WeightType::fp8_e4m3) && !gemm)) return false;
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
