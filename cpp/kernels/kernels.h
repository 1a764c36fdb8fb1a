// The whole contract between a MoE layer and its CPU kernels: weight types, row ranges, one table of functions
// per instruction set. No loops, no intrinsics, no ggml.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hybrid_moe {

// How the bytes of one weight row encode its k values. Layouts are ggml's (GGUF specification, see quants.h); FP8 is OCP
// E4M3FN: no infinities, codes 0x7F and 0xFF are NaN.
enum class WeightType : int {
    f32 = 0, f16 = 1, bf16 = 2, q8_0 = 3, fp8_e4m3 = 4,
    q4_0 = 5, q4_k = 6, q5_k = 7, q6_k = 8, iq4_xs = 9, mxfp4 = 10, nvfp4 = 11,
    foreign = 12,  // any other of the host's: no kernel here and no fact below is about it; devices may compute it
};

constexpr int n_weight_types = 12;  // with kernels

const char * name_of(WeightType type);

// Values per indivisible group of a row (Q8_0: 32, one F16 scale and 32 int8), at most 256, and that group's bytes.
int64_t group_len(WeightType type);
size_t  group_bytes(WeightType type);

// The weight matrix of one expert: y[row] = sum over i of value(row, i) * x[i].
// Value of an FP8 code = code x scale[row / block_rows][i / block_k]; every other type carries its own scale.
struct ExpertMatrix {
    WeightType      type;
    const uint8_t * w;           // [n_rows] rows, row_bytes apart; no alignment is assumed
    size_t          row_bytes;
    int64_t         n_rows;
    int64_t         k;           // values per row; a multiple of group_len(type)
    const float *   scale;       // FP8: [ceil(n_rows / block_rows)][ceil(k / block_k)], else null
    int64_t         block_rows;  // FP8: rows per scale block, the last block may be partial; else 0
    int64_t         block_k;     // FP8: columns per scale block, the last block may be partial; else 0

    int64_t n_k_blocks() const { return block_k ? (k + block_k - 1) / block_k : 1; }
    const uint8_t * row(int64_t i_row) const { return w + size_t(i_row) * row_bytes; }
    const float * row_scale(int64_t i_row) const { return scale + (i_row / block_rows) * n_k_blocks(); }
};

// Token rows that meet one expert.
struct TokenRows {
    const float * const * x;  // [m] pointers to k floats each
    float * const *       y;  // [m] pointers to n_rows floats each, indexed by the expert's row number
    int64_t               m;
};

// What stands between the projections of an expert. Names as in ggml; `limit` and `alpha` are parameters of some.
struct Activation {
    enum Kind : int {
        silu, gelu, relu, relu_squared,  // of `up` alone: there is no gate projection
        swiglu, geglu, reglu,            // f(gate) x up
        swiglu_oai,                      // min(gate, limit) x sigmoid(alpha x that) x (clamp(up, limit) + 1)  (gpt-oss)
        swiglu_clamp,                    // silu(min(gate, limit)) x clamp(up, limit)
        swiglu_limited,                  // min(silu(gate), limit) x clamp(up, limit)
    };
    Kind  kind  = swiglu;
    float alpha = 0.0f;
    float limit = 0.0f;
};

constexpr bool has_gate(Activation::Kind kind) { return kind >= Activation::swiglu; }

// Scratch of `gemm`: a panel of gemm_panel_rows x piece_k expanded weights, twice, and the activations of
// gemm_block_tokens x piece_k. 320 KiB: it stays in a 512 KiB L2.
constexpr int64_t piece_k           = 256;
constexpr int64_t gemm_panel_rows   = 32;  // tiles of rows are multiples of it
constexpr int64_t gemm_block_tokens = 128;
constexpr size_t  gemm_scratch_bytes = size_t(2 * gemm_panel_rows + gemm_block_tokens) * piece_k * sizeof(float);

// Results depend on the table (order of additions) but not on how a caller cuts rows or tokens into calls: a row's
// dot product is always accumulated in the same order for the same path, and the path depends on m of the whole expert
// only through `matmul`. NaN and infinity in x propagate. All functions are reentrant and allocate nothing.
struct Kernels {
    const char * name;

    // y[j][row] = dot(weight row, x[j]) for row in [row0, row1). For few token rows: weights are decoded in registers.
    // Types of quants.h meet rounded activations on all tables but the scalar one, here and in gemm, which needs no panel then.
    void (*dot)(const ExpertMatrix & e, int64_t row0, int64_t row1, const TokenRows & t);

    // The same product for many token rows: weights are expanded into `scratch` (gemm_scratch_bytes, 64-byte aligned)
    // once per block of token rows and multiplied from there.
    void (*gemm)(const ExpertMatrix & e, int64_t row0, int64_t row1, const TokenRows & t, float * scratch);

    // Decodes values [i0, i0 + n) of one row to float; i0 and n are multiples of group_len(type).
    void (*expand)(const ExpertMatrix & e, int64_t i_row, int64_t i0, int64_t n, float * out);

    // out[i] = activation(gate[i], up[i]); gate is not read by kinds without one. out may be gate or up.
    void (*activate)(const Activation & a, const float * gate, const float * up, int64_t n, float * out);

    // y[i] += a x x[i]
    void (*accumulate)(float a, const float * x, int64_t n, float * y);

    // Performs about n multiply-adds of floats as fast as it can; returns how many. For benchmarks.
    int64_t (*multiply_add)(int64_t n);

    // True when any of the n bytes is an E4M3 NaN code.
    bool (*has_fp8_nan)(const uint8_t * codes, size_t n);
};

// Whether a host should give us experts of that type on these kernels: only where stock ggml is not faster at any number of
// rows. All kernels compute all types.
bool worth_taking(const Kernels & kernels, WeightType type);

// From how many token rows per expert on `gemm` is used. Re-measure with `hybrid-moe bench kernels`.
int64_t gemm_min_rows(WeightType type);

// All implementations compiled in, fastest first; the last, "scalar", runs everywhere.
struct Implementation {
    const Kernels * kernels;
    bool (*runs_here)();
};
const Implementation * implementations(size_t * n);

// The fastest one that runs here, or the one named `forced` (null or empty: no force). Returns null with a sentence
// that lists the choices in `error` when `forced` is unknown or cannot run on this CPU.
const Kernels * select_kernels(const char * forced, char * error, size_t error_size);

}  // namespace hybrid_moe
