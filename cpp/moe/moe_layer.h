// A whole Mixture-of-Experts block for a batch of tokens, in the model's words: gate and up projections, activation,
// down projection, weighted sum over the chosen experts. Plain numbers and pointers; no ggml.
//
//   h[t, s]  = activation(gate[e] x[t] + gate_bias[e], up[e] x[t] + up_bias[e])         e = ids[t, s]
//   y[t]     = sum over s of weight[t, s] * (down[e] h[t, s] + down_bias[e])
//
// where a projection's product may have a scale per expert before its bias is added.
#pragma once

#include "moe/expert_matmul.h"

namespace hybrid_moe {

// [n_expert][n] floats, experts `stride` bytes apart; null when there is no bias.
struct ExpertBias {
    const uint8_t * data   = nullptr;
    int64_t         stride = 0;
    const float * of(int64_t i_expert) const {
        return data ? reinterpret_cast<const float *>(data + i_expert * stride) : nullptr;
    }
};

// [n_expert] floats, `stride` bytes apart; null when there is none.
struct ExpertScale {
    const uint8_t * data   = nullptr;
    int64_t         stride = 0;
    float of(int64_t i_expert) const {
        float f = 1.0f;
        if (data) __builtin_memcpy(&f, data + i_expert * stride, sizeof f);
        return f;
    }
};

// One projection: rows [row0, row0 + n_rows) of `weights` (a merged gate_up tensor holds two projections).
struct Projection {
    ExpertWeights weights;
    int64_t       row0   = 0;
    int64_t       n_rows = 0;
    ExpertScale   scale;
    ExpertBias    bias;  // indexed by the projection's own rows
};

struct MoeLayer {
    Projection gate;  // unused without has_gate(activation.kind)
    Projection up;
    Projection down;
    Activation activation;

    ExpertIds ids{};
    const uint8_t * weights = nullptr;  // float [n_tokens][n_used], null: all 1 (weighted before the block)
    int64_t weights_token_stride = 0;
    int64_t weights_slot_stride  = 0;
    const uint8_t * x = nullptr;        // float [n_tokens][n_x_slots][n_embd]; slot s reads row s % n_x_slots
    int64_t n_x_slots      = 1;
    int64_t x_token_stride = 0;
    int64_t x_slot_stride  = 0;
    uint8_t * y = nullptr;              // float [n_tokens][n_embd]; may overlap x
    int64_t y_token_stride = 0;

    // Whether kernels of ours can run it.
    bool has_kernels() const {
        const auto has = [](const Projection & p) { return p.n_rows == 0 || p.weights.shape.type != WeightType::foreign; };
        return has(gate) && has(up) && has(down);
    }
    int64_t n_ff() const { return up.n_rows; }
    int64_t n_embd() const { return down.n_rows; }
};

// Inputs that y overlaps are copied into the workspace, because y is written before all of them have been read.
void protect_inputs(MoeLayer & layer, Workspace & work);

// The other way: what y has overwritten is restored. `with_copies` is the layer after protect_inputs.
void unprotect_inputs(const MoeLayer & original, const MoeLayer & with_copies);

// Runs it on the CPU: all experts, or those in `only` ([n_expert], non-zero: in), whose share of y is then written to all
// rows. The order of additions: inside a dot product as the kernels say; over the experts of a token in
// ascending expert number.
RunStatus run_moe_layer(const MoeLayer & layer, const RunOptions & options, Workspace & work, char * error,
                        const std::vector<char> * only = nullptr);

}  // namespace hybrid_moe
