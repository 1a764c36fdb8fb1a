// The loops over weights, written once over the vocabulary `Vec` of the including file (see scalar.cpp for the
// smallest one). No intrinsics and no STL here: inlined library code would carry the file's ISA into other files.
//
// Vec: `width`, zero(), set1(float), load(const float *), store(float *), fma(a, b, c) = a * b + c, add, mul, div, min,
// max (as SSE: the second operand when one is NaN), where_positive(a, b) = a > 0 ? b : 0, exp, f16_bits(float) to nearest
// even, from_fp8 / from_i8 / from_bf16 / from_f16 (width codes at p), reduce4(a, b, c, d, float[4]) = four sums. from_fp8 returns
// code / fp8_unit. multiply_quants and expand_quants: see quants.h.

#include "numbers.h"

namespace {

// A weight row: its bytes and, for FP8, the scales of its blocks. Found once per tile: finding it divides.
struct Row {
    const uint8_t * codes;
    const float *   scale;
};

inline Row row_of(const ExpertMatrix & e, int64_t i_row) {
    return {e.row(i_row), e.scale ? e.row_scale(i_row) : nullptr};
}

// Stands for every type whose loops live in quants_*.cpp: one instance of the loops here serves them all.
constexpr WeightType any_quantised = WeightType::q4_0;

// One weight type = how to find a block, its scale, and its codes. A block is the longest run that shares one scale.
template <WeightType T> struct Codes;

// Types without a scale: one block spans the row.
template <size_t Bytes> struct Plain {
    static constexpr bool   scaled = false;
    static constexpr size_t bytes  = Bytes;
    static constexpr float  unit   = 1.0f;  // of what decode returns
    static int64_t block_len(const ExpertMatrix & e) { return e.k; }
    static const uint8_t * at(const Row & row, int64_t i) { return row.codes + size_t(i) * Bytes; }
    static float scale(const Row &, int64_t) { return 1.0f; }
};

template <> struct Codes<WeightType::f32> : Plain<4> {
    static Vec decode(const uint8_t * p) { return Vec::load(reinterpret_cast<const float *>(p)); }
    static float decode1(const uint8_t * p) { float f; __builtin_memcpy(&f, p, sizeof f); return f; }
};

template <> struct Codes<WeightType::f16> : Plain<2> {
    static Vec decode(const uint8_t * p) { return Vec::from_f16(p); }
    static float decode1(const uint8_t * p) { return f32_of_f16(load_u16(p)); }
};

template <> struct Codes<WeightType::bf16> : Plain<2> {
    static Vec decode(const uint8_t * p) { return Vec::from_bf16(p); }
    static float decode1(const uint8_t * p) { return f32_of_bf16(load_u16(p)); }
};

template <> struct Codes<WeightType::q8_0> {
    static constexpr bool   scaled = true;
    static constexpr size_t bytes  = 1;
    static constexpr float  unit   = 1.0f;
    static int64_t block_len(const ExpertMatrix &) { return 32; }
    static const uint8_t * at(const Row & row, int64_t i) { return row.codes + size_t(i / 32) * 34 + 2 + size_t(i % 32); }
    static float scale(const Row & row, int64_t i_block) { return Vec::f16_scale(row.codes + size_t(i_block) * 34); }
    static Vec decode(const uint8_t * p) { return Vec::from_i8(p); }
    static float decode1(const uint8_t * p) { return float(int8_t(*p)); }
};

template <> struct Codes<WeightType::fp8_e4m3> {
    static constexpr bool   scaled = true;
    static constexpr size_t bytes  = 1;
    static constexpr float  unit   = Vec::fp8_unit;
    static int64_t block_len(const ExpertMatrix & e) { return e.block_k; }
    static const uint8_t * at(const Row & row, int64_t i) { return row.codes + size_t(i); }
    static float scale(const Row & row, int64_t i_block) { return row.scale[i_block]; }
    static Vec decode(const uint8_t * p) { return Vec::from_fp8(p); }
    static float decode1(const uint8_t * p) { return f32_of_fp8(*p); }
};

// Decoded codes as values. Apart from the scale: a scale times 2^120 can overflow, and products without it underflow.
template <WeightType T> inline Vec in_units(Vec v) {
    if constexpr (Codes<T>::unit == 1.0f) return v;
    else return Vec::mul(v, Vec::set1(Codes<T>::unit));
}

inline int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }

template <int N> inline void sums(const Vec (&v)[N], float * out) {
    float four[4];
    for (int i = 0; i < N; i += 4) {
        const Vec z = Vec::zero();
        Vec::reduce4(v[i], i + 1 < N ? v[i + 1] : z, i + 2 < N ? v[i + 2] : z, i + 3 < N ? v[i + 3] : z, four);
        for (int j = i; j < N && j < i + 4; j++) out[j] = four[j - i];
    }
}

// What to fetch while byte i of some rows is multiplied, R rows at a time: a kilobyte further, which at a row's end is in the row
// that comes next on the same stream.
inline size_t fetch_ahead(const ExpertMatrix & e, int64_t i, int R) {
    const size_t at = size_t(i) + 1024;
    return at < e.row_bytes ? at : at + size_t(R - 1) * e.row_bytes;
}

// R weight rows times M token rows. Codes are summed inside a block and scaled once per block, in ascending order.
template <WeightType T, int R, int M>
inline void dot_tile(const ExpertMatrix & e, int64_t row0, const float * const * x, float * const * y) {
    using C = Codes<T>;
    Row row[R];
    Vec total[R * M];
    float tail[R * M];
    for (int r = 0; r < R; r++) row[r] = row_of(e, row0 + r);
    for (int i = 0; i < R * M; i++) {
        total[i] = Vec::zero();
        tail[i] = 0.0f;
    }
    constexpr int64_t line = 64 / int64_t(C::bytes);  // columns of a cache line
    const int64_t len = C::block_len(e);
    int64_t i_block = 0;
    for (int64_t b0 = 0; b0 < e.k; b0 += len, i_block++) {
        const int64_t b1 = min_i64(b0 + len, e.k);
        const int64_t full = b0 + (b1 - b0) / Vec::width * Vec::width;
        const uint8_t * code[R];
        Vec acc[R * M];
        for (int r = 0; r < R; r++) code[r] = C::at(row[r], b0);
        for (int i = 0; i < R * M; i++) acc[i] = C::scaled ? Vec::zero() : total[i];
        for (int64_t i = b0; i < full;) {
            const size_t ahead = fetch_ahead(e, i * int64_t(C::bytes), R);
            for (int r = 0; r < R; r++) __builtin_prefetch(row[r].codes + ahead);
            for (const int64_t end = min_i64(i + line, full); i < end; i += Vec::width) {
                Vec xv[M];
                for (int j = 0; j < M; j++) xv[j] = Vec::load(x[j] + i);
                for (int r = 0; r < R; r++) {
                    const Vec w = in_units<T>(C::decode(code[r] + size_t(i - b0) * C::bytes));
                    for (int j = 0; j < M; j++) acc[r * M + j] = Vec::fma(w, xv[j], acc[r * M + j]);
                }
            }
        }
        float scale[R];
        for (int r = 0; r < R; r++) scale[r] = C::scaled ? C::scale(row[r], i_block) : 1.0f;
        for (int r = 0; r < R; r++) {
            for (int j = 0; j < M; j++) {
                Vec & t = total[r * M + j];
                t = C::scaled ? Vec::fma(acc[r * M + j], Vec::set1(scale[r]), t) : acc[r * M + j];
            }
            for (int64_t i = full; i < b1; i++) {
                const float w = C::decode1(code[r] + size_t(i - b0) * C::bytes) * scale[r];
                for (int j = 0; j < M; j++) tail[r * M + j] += w * x[j][i];
            }
        }
    }
    float out[R * M];
    sums<R * M>(total, out);
    for (int r = 0; r < R; r++) {
        for (int j = 0; j < M; j++) y[j][row0 + r] = out[r * M + j] + tail[r * M + j];
    }
}

// One row of a type without scales times one token row: one stream from memory, several chains of additions.
template <WeightType T>
inline void dot_row(const ExpertMatrix & e, int64_t i_row, const float * x, float * y) {
    using C = Codes<T>;
    constexpr int n_chains = 4;
    constexpr int64_t step = n_chains * Vec::width;
    const uint8_t * codes = e.row(i_row);
    Vec sum[n_chains];
    for (Vec & v : sum) v = Vec::zero();
    int64_t i = 0;
    for (; i + step <= e.k; i += step) {
        for (int64_t b = 0; b < step * int64_t(C::bytes); b += 64) __builtin_prefetch(codes + i * int64_t(C::bytes) + b + 1024);
        for (int c = 0; c < n_chains; c++) {
            const int64_t at = i + c * Vec::width;
            sum[c] = Vec::fma(C::decode(codes + size_t(at) * C::bytes), Vec::load(x + at), sum[c]);
        }
    }
    float out[n_chains];
    sums<n_chains>(sum, out);
    float total = (out[0] + out[1]) + (out[2] + out[3]);
    for (; i < e.k; i++) total += C::decode1(codes + size_t(i) * C::bytes) * x[i];
    y[i_row] = total;
}

template <WeightType T, int M>
inline void dot_rows(const ExpertMatrix & e, int64_t row0, int64_t row1, const float * const * x, float * const * y) {
    constexpr int R = M == 1 ? 4 : 2;  // registers: R blocks + R totals per token row, the codes and x
    int64_t r = row0;
    if constexpr (M == 1 && !Codes<T>::scaled) {
        for (; r < row1; r++) dot_row<T>(e, r, x[0], y[0]);
    }
    for (; r + R <= row1; r += R) dot_tile<T, R, M>(e, r, x, y);
    for (; r < row1; r++) dot_tile<T, 1, M>(e, r, x, y);
}

template <WeightType T>
void dot_typed(const ExpertMatrix & e, int64_t row0, int64_t row1, const TokenRows & t) {
    int64_t j = 0;
    for (; j + 3 <= t.m; j += 3) dot_rows<T, 3>(e, row0, row1, t.x + j, t.y + j);
    if (t.m - j == 2) dot_rows<T, 2>(e, row0, row1, t.x + j, t.y + j);
    if (t.m - j == 1) dot_rows<T, 1>(e, row0, row1, t.x + j, t.y + j);
}

template <WeightType T>
void expand_typed(const ExpertMatrix & e, int64_t i_row, int64_t i0, int64_t n, float * out) {
    using C = Codes<T>;
    const Row row = row_of(e, i_row);
    const int64_t len = C::block_len(e);
    for (int64_t i = i0; i < i0 + n;) {
        const int64_t i_block = C::scaled ? i / len : 0;
        const int64_t end = C::scaled ? min_i64((i_block + 1) * len, i0 + n) : i0 + n;
        const float scale = C::scaled ? C::scale(row, i_block) : 1.0f;
        const Vec s = Vec::set1(scale);
        const uint8_t * code = C::at(row, i);
        const int64_t first = i;
        for (; i + Vec::width <= end; i += Vec::width) {
            const Vec w = C::decode(code + size_t(i - first) * C::bytes);
            (C::scaled ? Vec::mul(in_units<T>(w), s) : w).store(out + (i - i0));
        }
        for (; i < end; i++) out[i - i0] = C::decode1(code + size_t(i - first) * C::bytes) * scale;
    }
}

template <> inline void expand_typed<any_quantised>(const ExpertMatrix & e, int64_t i_row, int64_t i0, int64_t n, float * out) {
    Vec::expand_quants(e, i_row, i0, n, out);
}

// Calls f on whole vectors of gate and up; the rest goes through padded copies, so that it is computed in the same way.
template <class F> inline void for_each_vec(const float * gate, const float * up, int64_t n, float * out, const F & f) {
    int64_t i = 0;
    for (; i + Vec::width <= n; i += Vec::width) f(gate ? Vec::load(gate + i) : Vec::zero(), Vec::load(up + i)).store(out + i);
    if (i == n) return;
    float g[Vec::width] = {};
    float u[Vec::width] = {};
    for (int64_t j = i; j < n; j++) {
        if (gate) g[j - i] = gate[j];
        u[j - i] = up[j];
    }
    f(Vec::load(g), Vec::load(u)).store(u);
    for (int64_t j = i; j < n; j++) out[j] = u[j - i];
}

// x / (1 + exp(-alpha x)). Infinities behave as in that formula: silu(-inf) is NaN.
inline Vec sigmoid_times(Vec x, float alpha) {
    return Vec::div(x, Vec::add(Vec::set1(1.0f), Vec::exp(Vec::mul(x, Vec::set1(-alpha)))));
}

// The bounds are the first operands of min and max: a NaN in x passes.
inline Vec at_most(float limit, Vec x) { return Vec::min(Vec::set1(limit), x); }
inline Vec within(float limit, Vec x) { return Vec::max(Vec::set1(-limit), at_most(limit, x)); }

// ggml evaluates GELU through a table over F16: input and result are rounded to it. Same values here.
inline Vec gelu(Vec x) {
    float v[Vec::width];
    x.store(v);
    for (int i = 0; i < Vec::width; i++) {
        if (v[i] <= -10.0f) v[i] = 0.0f;
        if (v[i] >= 10.0f || v[i] == 0.0f) continue;
        const float r = f32_of_f16(Vec::f16_bits(v[i]));
        const float t = __builtin_tanhf(0.79788456080286535587989211986876f * r * (1.0f + 0.044715f * r * r));
        v[i] = f32_of_f16(Vec::f16_bits(0.5f * r * (1.0f + t)));
    }
    return Vec::load(v);
}

void activate(const Activation & a, const float * gate, const float * up, int64_t n, float * out) {
    const Vec zero = Vec::zero();
    const float limit = a.limit;
    const float alpha = a.alpha;
    switch (a.kind) {
        case Activation::silu:         for_each_vec(nullptr, up, n, out, [](Vec, Vec u) { return sigmoid_times(u, 1.0f); }); break;
        case Activation::gelu:         for_each_vec(nullptr, up, n, out, [](Vec, Vec u) { return gelu(u); }); break;
        case Activation::relu:         for_each_vec(nullptr, up, n, out, [=](Vec, Vec u) { return Vec::max(u, zero); }); break;
        case Activation::relu_squared:
            for_each_vec(nullptr, up, n, out, [=](Vec, Vec u) { const Vec r = Vec::max(u, zero); return Vec::mul(r, r); });
            break;
        case Activation::swiglu: for_each_vec(gate, up, n, out, [](Vec g, Vec u) { return Vec::mul(sigmoid_times(g, 1.0f), u); }); break;
        case Activation::geglu:  for_each_vec(gate, up, n, out, [](Vec g, Vec u) { return Vec::mul(gelu(g), u); }); break;
        case Activation::reglu:  for_each_vec(gate, up, n, out, [=](Vec g, Vec u) { return Vec::where_positive(g, Vec::mul(g, u)); }); break;
        case Activation::swiglu_oai:
            for_each_vec(gate, up, n, out, [=](Vec g, Vec u) {
                return Vec::mul(sigmoid_times(at_most(limit, g), alpha), Vec::add(within(limit, u), Vec::set1(1.0f)));
            });
            break;
        case Activation::swiglu_clamp:
            for_each_vec(gate, up, n, out, [=](Vec g, Vec u) { return Vec::mul(sigmoid_times(at_most(limit, g), 1.0f), within(limit, u)); });
            break;
        case Activation::swiglu_limited:
            for_each_vec(gate, up, n, out, [=](Vec g, Vec u) { return Vec::mul(at_most(limit, sigmoid_times(g, 1.0f)), within(limit, u)); });
            break;
    }
}

int64_t multiply_add(int64_t n) {
    constexpr int chains = 12;  // enough to hide the latency of fma on two ports
    Vec acc[chains];
    for (int c = 0; c < chains; c++) acc[c] = Vec::set1(float(c));
    const Vec a = Vec::set1(0.999f);
    const Vec b = Vec::set1(1e-3f);
    const int64_t turns = n / (chains * Vec::width);
    for (int64_t i = 0; i < turns; i++) {
        for (int c = 0; c < chains; c++) acc[c] = Vec::fma(acc[c], a, b);
    }
    float out[chains];
    sums<chains>(acc, out);
    volatile float sink = out[0];
    (void) sink;
    for (int c = 1; c < chains; c++) sink = out[c];
    return turns * chains * Vec::width;
}

void accumulate(float a, const float * x, int64_t n, float * y) {
    const Vec va = Vec::set1(a);
    int64_t i = 0;
    for (; i + Vec::width <= n; i += Vec::width) Vec::fma(va, Vec::load(x + i), Vec::load(y + i)).store(y + i);
    for (; i < n; i++) y[i] = a * x[i] + y[i];
}

// Calls f.run<T>() for the type at run time.
template <class F> inline void with_type(WeightType type, const F & f) {
    switch (type) {
        case WeightType::f32:      f.template run<WeightType::f32>(); break;
        case WeightType::f16:      f.template run<WeightType::f16>(); break;
        case WeightType::bf16:     f.template run<WeightType::bf16>(); break;
        case WeightType::q8_0:     f.template run<WeightType::q8_0>(); break;
        case WeightType::fp8_e4m3: f.template run<WeightType::fp8_e4m3>(); break;
        default:                   f.template run<any_quantised>(); break;
    }
}

struct DotCall {
    const ExpertMatrix & e; int64_t row0, row1; const TokenRows & t;
    template <WeightType T> void run() const {
        if constexpr (is_quantised(T)) Vec::multiply_quants(e, row0, row1, t);
        else dot_typed<T>(e, row0, row1, t);
    }
};

struct ExpandCall {
    const ExpertMatrix & e; int64_t i_row, i0, n; float * out;
    template <WeightType T> void run() const { expand_typed<T>(e, i_row, i0, n, out); }
};

void dot(const ExpertMatrix & e, int64_t row0, int64_t row1, const TokenRows & t) {
    const Vec::Environment environment;
    with_type(e.type, DotCall{e, row0, row1, t});
}

void expand(const ExpertMatrix & e, int64_t i_row, int64_t i0, int64_t n, float * out) {
    const Vec::Environment environment;
    with_type(e.type, ExpandCall{e, i_row, i0, n, out});
}

}  // namespace
