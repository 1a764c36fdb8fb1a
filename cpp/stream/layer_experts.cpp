// LayerExperts of a MoeLayer.
#include "stream/layer_experts.h"

#include <algorithm>

namespace hybrid_moe {
namespace {

PartWeights part_of(const Projection & p) {
    PartWeights part;
    part.weights      = p.weights;
    part.name         = p.weights.name;
    part.weights.name = "";
    part.row0         = p.row0;
    part.n_rows       = p.n_rows;
    part.device_type  = p.weights.shape.type == WeightType::foreign ? ggml_type(p.weights.host_type) : device_type_of(p.weights.shape.type);
    if (p.weights.scattered) p.weights.scattered->block(part.block_rows, part.block_k);
    return part;
}

bool is_same_matrix(const PartWeights & a, const PartWeights & b) {
    return a.weights.base == b.weights.base && a.weights.scattered == b.weights.scattered && a.row0 == b.row0 && a.n_rows == b.n_rows;
}

bool is_same_shape(const PartWeights & a, const PartWeights & b) {
    if (a.n_rows != b.n_rows) return false;
    if (!a.exists()) return true;
    return a.k() == b.k() && a.weights.shape.type == b.weights.shape.type && a.device_type == b.device_type &&
           a.block_rows == b.block_rows && a.block_k == b.block_k;
}

}  // namespace

ggml_type device_type_of(WeightType type) {
    switch (type) {
        case WeightType::f32:      return GGML_TYPE_F32;
        case WeightType::f16:      return GGML_TYPE_F16;
        case WeightType::bf16:     return GGML_TYPE_BF16;
        case WeightType::fp8_e4m3: return GGML_TYPE_BF16;
        case WeightType::q8_0:     return GGML_TYPE_Q8_0;
        case WeightType::q4_0:     return GGML_TYPE_Q4_0;
        case WeightType::q4_k:     return GGML_TYPE_Q4_K;
        case WeightType::q5_k:     return GGML_TYPE_Q5_K;
        case WeightType::q6_k:     return GGML_TYPE_Q6_K;
        case WeightType::iq4_xs:   return GGML_TYPE_IQ4_XS;
        case WeightType::mxfp4:    return GGML_TYPE_MXFP4;
        case WeightType::nvfp4:    return GGML_TYPE_NVFP4;
        case WeightType::foreign:  break;
    }
    return GGML_TYPE_F32;
}

size_t PartWeights::device_row_bytes() const { return host().ggml_row_size(device_type, k()); }

bool LayerExperts::may_be_read_ahead() const {
    return std::all_of(parts.begin(), parts.end(), [](const PartWeights & p) { return !p.exists() || p.weights.end_is_told; });
}

bool LayerExperts::may_be_codes() const {
    for (const PartWeights & p : parts) {
        if (p.exists() && (!p.is_fp8() || p.block_rows < 1 || p.row0 % p.block_rows != 0)) return false;
    }
    return true;
}

size_t LayerExperts::source_bytes() const {
    size_t n = 0;
    for (const PartWeights & p : parts) n += p.exists() ? p.source_bytes() : 0;
    return n;
}

bool LayerExperts::is_same(const LayerExperts & o) const {
    for (size_t i = 0; i < parts.size(); i++) {
        if (!is_same_matrix(parts[i], o.parts[i])) return false;
    }
    return true;
}

bool LayerExperts::has_shape_of(const LayerExperts & o) const {
    for (size_t i = 0; i < parts.size(); i++) {
        if (!is_same_shape(parts[i], o.parts[i])) return false;
    }
    return true;
}

LayerExperts experts_of(const MoeLayer & layer) {
    LayerExperts e;
    if (has_gate(layer.activation.kind)) e.parts[size_t(Part::gate)] = part_of(layer.gate);
    e.parts[size_t(Part::up)]   = part_of(layer.up);
    e.parts[size_t(Part::down)] = part_of(layer.down);
    return e;
}

}  // namespace hybrid_moe
