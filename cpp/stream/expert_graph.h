// What a device computes for one expert, as ggml graphs on tensors at fixed places in its memory:
//
//   xe   = X[rows]                                         GET_ROWS
//   h    = activation(Wg xe x scale + bias, Wu xe ...)     MUL_MAT, ADD, GLU ...
//   y    = (Wd h x scale + bias) x routing weight          MUL_MAT, ADD, MUL
//   Y[rows] += y                                           GET_ROWS, ADD, SET_ROWS
//
// A token meets an expert at most once, so rows of one expert never collide in Y; experts follow each other in the
// instance's queue. Rows are tiled, so that the intermediates stay small whatever the batch is.
#pragma once

#include "moe/moe_layer.h"
#include "stream/layer_experts.h"

#include <array>
#include <memory>

namespace hybrid_moe {

// Rows of one expert that are computed at once: enough for a GPU's GEMM, little memory.
constexpr int64_t device_tile_rows = 1024;
// Index vectors of experts begin at multiples of this, because devices want aligned offsets.
constexpr int64_t index_alignment = 64;

// A ggml context without data, given back at the end.
class TensorContext {
public:
    explicit TensorContext(size_t n_tensors);
    ~TensorContext();
    TensorContext(const TensorContext &) = delete;
    TensorContext & operator=(const TensorContext &) = delete;
    ggml_context * get() const { return ctx_; }
    void reset() const { host().ggml_reset(ctx_); }

private:
    ggml_context * ctx_;
};

// How FP8 parts lie in device memory; others are as they are.
enum class Fp8Form { bf16, codes };  // codes: as I8, with their scales

// The matrices of one expert in one place.
struct SlotTensors {
    SlotTensors(const LayerExperts & experts, Fp8Form form);

    size_t n_bytes(const Gpu & gpu) const;  // that the place must have
    void place(const Gpu & gpu, const GpuMemory & memory);
    void pretend(const GpuMemory & memory) const;  // as GpuMemory does: slots in use stay as they are

    ggml_tensor * part(Part p) const { return parts[size_t(p)]; }

    TensorContext                       context;
    std::array<ggml_tensor *, n_parts>  parts{};
    std::array<ggml_tensor *, n_parts>  scales{};  // of codes, else null
};

// Everything on the device that belongs to one batch of a layer: inputs, indices, the sum, and room for intermediates.
struct BatchShape {
    int64_t n_embd_in = 0, n_embd_out = 0, n_ff = 0;
    int64_t n_x_rows  = 0;  // n_tokens x n_x_slots
    int64_t n_tokens  = 0;
    int64_t n_index   = 0;  // pairs, with padding between experts
    int64_t tile_rows = 0;
    int64_t n_bias_experts = 0;  // 0: no biases

    bool operator==(const BatchShape &) const = default;
};

struct BatchTensors {
    BatchTensors(const BatchShape & shape, bool x_is_elsewhere);

    size_t n_bytes(const Gpu & gpu) const;
    void place(const Gpu & gpu, const GpuMemory & memory);

    BatchShape    shape;
    TensorContext context;
    ggml_tensor * x = nullptr;         // [n_x_rows][n_embd_in]; null: elsewhere
    ggml_tensor * y = nullptr;         // [n_tokens][n_embd_out]
    ggml_tensor * x_index = nullptr;   // [n_index] rows of x
    ggml_tensor * y_index = nullptr;   // [n_index] rows of y
    ggml_tensor * weight  = nullptr;   // [n_index]
    std::array<ggml_tensor *, n_parts> bias{};  // [n_expert][n_rows], null: none
    std::array<size_t, 4> work{};      // offsets: tile x max(n_embd_in, n_embd_out), tile x n_ff twice, tile x n_embd_out
    const GpuMemory * memory = nullptr;

private:
    template <class F> size_t lay_out(const Gpu & gpu, F && place_one);
};

// Rows [begin, begin + n_rows) of the index vectors.
struct ExpertRows {
    int64_t i_expert;
    int64_t begin;
    int64_t n_rows;
};

class ExpertGraph {
public:
    ExpertGraph(const MoeLayer & layer, const BatchTensors & batch, ggml_tensor * x) : layer_(&layer), batch_(&batch), x_(x) {}

    // In `context`, which is reset; it must stay until the graph has run. n_rows <= tile_rows.
    ggml_cgraph * build(const TensorContext & context, const SlotTensors & slot, const ExpertRows & rows) const;

    // A node of the graph that the device cannot compute, or null.
    const ggml_tensor * unsupported(const Gpu & gpu, const TensorContext & context, const SlotTensors & slot) const;

    static constexpr size_t max_nodes = 64;

private:
    struct Build;
    const MoeLayer *     layer_;
    const BatchTensors * batch_;
    ggml_tensor *        x_;
};

}  // namespace hybrid_moe
