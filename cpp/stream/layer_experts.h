// The expert matrices of one layer as a device holds them, whatever batch meets them: what can be copied ahead of time.
#pragma once

#include "moe/moe_layer.h"
#include "stream/gpu.h"

#include <array>
#include <string>

namespace hybrid_moe {

enum class Part { gate, up, down };
constexpr int n_parts = 3;

// Rows [row0, row0 + n_rows) of every expert of a tensor.
struct PartWeights {
    ExpertWeights weights;
    std::string   name;         // the tensor's: weights.name lives only as long as the model
    int64_t       row0   = 0;
    int64_t       n_rows = 0;   // 0: the layer has no such projection
    ggml_type     device_type = GGML_TYPE_F32;  // what a device computes with: FP8 is expanded to BF16
    int64_t       block_rows = 0, block_k = 0;  // of FP8 scales

    bool exists() const { return n_rows > 0; }
    bool is_fp8() const { return weights.shape.type == WeightType::fp8_e4m3; }
    int64_t k() const { return weights.shape.k; }
    size_t device_row_bytes() const;
    size_t source_bytes() const { return weights.shape.row_bytes * size_t(n_rows); }  // of one expert
    int64_t n_scales() const { return (n_rows + block_rows - 1) / block_rows * ((k() + block_k - 1) / block_k); }
};

struct LayerExperts {
    std::array<PartWeights, n_parts> parts;

    int64_t n_expert() const { return down().weights.shape.n_expert; }
    const PartWeights & part(Part p) const { return parts[size_t(p)]; }
    const PartWeights & down() const { return part(Part::down); }
    bool may_be_read_ahead() const;  // while no layer runs, because we learn when they go
    bool may_be_codes() const;  // all parts are FP8, and each begins with a whole block of scales
    size_t source_bytes() const;  // of one expert
    const std::string & name() const { return part(Part::up).name; }

    // The same tensors, so that what was copied for one serves the other.
    bool is_same(const LayerExperts & o) const;
    // The same types and shapes, so that one's slots can hold the other's experts.
    bool has_shape_of(const LayerExperts & o) const;
};

LayerExperts experts_of(const MoeLayer & layer);

// Of our types; FP8 becomes BF16.
ggml_type device_type_of(WeightType type);

}  // namespace hybrid_moe
