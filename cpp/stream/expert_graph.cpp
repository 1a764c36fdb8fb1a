// Tensors of slots and batches, and the graph of one expert.
#include "stream/expert_graph.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace hybrid_moe {
namespace {

// [ne1][ne0] four-byte values of a longer vector, from its element `begin` on.
ggml_tensor * piece_of(ggml_context * ctx, const BatchTensors & batch, const ggml_tensor * whole, int64_t begin, int64_t ne0, int64_t ne1) {
    ggml_tensor * t = host().ggml_new_tensor_2d(ctx, whole->type, ne0, ne1);
    const size_t base = size_t(static_cast<uint8_t *>(whole->data) - batch.memory->base());
    batch.memory->place(t, base + size_t(begin) * 4);
    return t;
}

// SYCL rearranges the bytes of quantised weights at their first small product, and notes that on the tensor; but in a slot
// the next expert's bytes follow, as they are stored. Without a place for the note it leaves weights as they are.
void keep_as_written(const Gpu & gpu, ggml_tensor * weights) {
    if (gpu.family == "SYCL") weights->extra = nullptr;
}

}  // namespace

TensorContext::TensorContext(size_t n_tensors) {
    const size_t bytes = n_tensors * host().ggml_tensor_overhead() + host().ggml_graph_overhead_custom(ExpertGraph::max_nodes, false);
    ctx_ = host().ggml_init({bytes, nullptr, true});
    if (!ctx_) throw std::bad_alloc();
}

TensorContext::~TensorContext() { host().ggml_free(ctx_); }

SlotTensors::SlotTensors(const LayerExperts & experts, Fp8Form form) : context(2 * n_parts) {
    for (size_t i = 0; i < parts.size(); i++) {
        const PartWeights & p = experts.parts[i];
        if (!p.exists()) continue;
        const bool as_codes = p.is_fp8() && form == Fp8Form::codes;
        parts[i] = host().ggml_new_tensor_2d(context.get(), as_codes ? GGML_TYPE_I8 : p.device_type, p.k(), p.n_rows);
        if (as_codes) scales[i] = host().ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, p.n_scales());
    }
}

size_t SlotTensors::n_bytes(const Gpu & gpu) const {
    size_t n = 0;
    ggml_backend_buffer_type_t type = host().ggml_backend_dev_buffer_type(gpu.device);
    for (const auto * all : {&parts, &scales}) {
        for (const ggml_tensor * t : *all) n += t ? align_up(host().ggml_backend_buft_get_alloc_size(type, t), gpu.alignment) : 0;
    }
    return n;
}

void SlotTensors::place(const Gpu & gpu, const GpuMemory & memory) {
    size_t offset = 0;
    ggml_backend_buffer_type_t type = host().ggml_backend_dev_buffer_type(gpu.device);
    for (const auto * all : {&parts, &scales}) {
        for (ggml_tensor * t : *all) {
            if (!t) continue;
            memory.place(t, offset);
            keep_as_written(gpu, t);
            offset += align_up(host().ggml_backend_buft_get_alloc_size(type, t), gpu.alignment);
        }
    }
}

void SlotTensors::pretend(const GpuMemory & memory) const {
    for (ggml_tensor * t : parts) {
        if (t) memory.pretend(t);
    }
}

BatchTensors::BatchTensors(const BatchShape & s, bool x_is_elsewhere) : shape(s), context(16) {
    const Host & h = host();
    ggml_context * ctx = context.get();
    if (!x_is_elsewhere) x = h.ggml_new_tensor_2d(ctx, GGML_TYPE_F32, s.n_embd_in, s.n_x_rows);
    y       = h.ggml_new_tensor_2d(ctx, GGML_TYPE_F32, s.n_embd_out, s.n_tokens);
    x_index = h.ggml_new_tensor_1d(ctx, GGML_TYPE_I32, s.n_index);
    y_index = h.ggml_new_tensor_1d(ctx, GGML_TYPE_I32, s.n_index);
    weight  = h.ggml_new_tensor_1d(ctx, GGML_TYPE_F32, s.n_index);
    for (size_t i = 0; s.n_bias_experts && i < n_parts; i++) {
        // Rows of one bias begin at aligned offsets: [n_expert] rows, padded.
        const int64_t n = Part(i) == Part::down ? s.n_embd_out : s.n_ff;
        bias[i] = h.ggml_new_tensor_2d(ctx, GGML_TYPE_F32, int64_t(align_up(size_t(n), size_t(index_alignment))), s.n_bias_experts);
    }
}

template <class F> size_t BatchTensors::lay_out(const Gpu & gpu, F && place_one) {
    size_t offset = 0;
    ggml_backend_buffer_type_t type = host().ggml_backend_dev_buffer_type(gpu.device);
    for (ggml_tensor * t : {x, y, x_index, y_index, weight, bias[0], bias[1], bias[2]}) {
        if (!t) continue;
        place_one(t, offset);
        offset += align_up(host().ggml_backend_buft_get_alloc_size(type, t), gpu.alignment);
    }
    const int64_t widths[4] = {std::max(shape.n_embd_in, shape.n_embd_out), shape.n_ff, shape.n_ff, shape.n_embd_out};
    for (size_t i = 0; i < work.size(); i++) {
        work[i] = offset;
        offset += align_up(size_t(shape.tile_rows * widths[i]) * sizeof(float), gpu.alignment);
    }
    return offset;
}

size_t BatchTensors::n_bytes(const Gpu & gpu) const {
    return const_cast<BatchTensors *>(this)->lay_out(gpu, [](ggml_tensor *, size_t) {});
}

void BatchTensors::place(const Gpu & gpu, const GpuMemory & at) {
    memory = &at;
    lay_out(gpu, [&](ggml_tensor * t, size_t offset) { at.place(t, offset); });
}

// One graph while it is built: each step's result gets its place at once.
struct ExpertGraph::Build {
    const MoeLayer &     layer;
    const BatchTensors & batch;
    ggml_context *       ctx;
    const SlotTensors &  slot;
    const ExpertRows &   rows;

    ggml_tensor * at(ggml_tensor * t, size_t i_work) const {
        batch.memory->place(t, batch.work[i_work]);
        return t;
    }

    // Products, scaled and with their bias, at one place: elementwise steps work in place.
    ggml_tensor * project(Part part, const Projection & p, ggml_tensor * x, size_t i_work) const {
        const Host & h = host();
        ggml_tensor * t = h.ggml_mul_mat(ctx, slot.part(part), x);
        t->op_params[0] = GGML_PREC_F32;  // as precise as the CPU's sum, where the device has a choice
        at(t, i_work);
        if (p.scale.data) t = at(h.ggml_scale(ctx, t, p.scale.of(rows.i_expert)), i_work);
        if (p.bias.data) {
            const ggml_tensor * all = batch.bias[size_t(part)];
            t = at(h.ggml_add(ctx, t, piece_of(ctx, batch, all, rows.i_expert * all->ne[0], p.n_rows, 1)), i_work);
        }
        return t;
    }

    ggml_tensor * unary(ggml_unary_op op, ggml_tensor * t, size_t i_work) const { return at(host().ggml_unary(ctx, t, op), i_work); }

    // Ops that ggml makes as views of what they change.
    ggml_tensor * in_place(ggml_tensor * t) const {
        if (host().ggml_backend_view_init(t) != GGML_STATUS_SUCCESS) throw DeviceError("a view cannot be placed in device memory");
        return t;
    }

    ggml_tensor * clamp(ggml_tensor * t, float low, float high) const { return in_place(host().ggml_clamp(ctx, t, low, high)); }

    ggml_tensor * glu(ggml_glu_op op, ggml_tensor * gate, ggml_tensor * up) const {
        ggml_tensor * t = host().ggml_glu_split(ctx, gate, up, op);
        memcpy(&t->op_params[2], &layer.activation.alpha, sizeof(float));
        memcpy(&t->op_params[3], &layer.activation.limit, sizeof(float));
        return at(t, 1);
    }

    ggml_tensor * activate(ggml_tensor * gate, ggml_tensor * up) const {
        const float limit = layer.activation.limit;
        switch (layer.activation.kind) {
            case Activation::silu:         return unary(GGML_UNARY_OP_SILU, up, 2);
            case Activation::gelu:         return unary(GGML_UNARY_OP_GELU, up, 2);
            case Activation::relu:         return unary(GGML_UNARY_OP_RELU, up, 2);
            case Activation::relu_squared: return at(host().ggml_sqr(ctx, unary(GGML_UNARY_OP_RELU, up, 2)), 2);
            case Activation::swiglu:       return glu(GGML_GLU_OP_SWIGLU, gate, up);
            case Activation::geglu:        return glu(GGML_GLU_OP_GEGLU, gate, up);
            case Activation::reglu:        return glu(GGML_GLU_OP_REGLU, gate, up);
            case Activation::swiglu_oai:   return glu(GGML_GLU_OP_SWIGLU_OAI, gate, up);
            case Activation::swiglu_clamp: return glu(GGML_GLU_OP_SWIGLU_CLAMP, gate, up);
            case Activation::swiglu_limited: {
                ggml_tensor * g = clamp(unary(GGML_UNARY_OP_SILU, gate, 1), -std::numeric_limits<float>::infinity(), limit);
                return at(host().ggml_mul(ctx, g, clamp(up, -limit, limit)), 1);
            }
        }
        return nullptr;
    }

    ggml_tensor * index(const ggml_tensor * all) const { return piece_of(ctx, batch, all, rows.begin, rows.n_rows, 1); }

    ggml_tensor * weighted(ggml_tensor * t, size_t i_work) const {
        return at(host().ggml_mul(ctx, t, piece_of(ctx, batch, batch.weight, rows.begin, 1, rows.n_rows)), i_work);
    }

    ggml_tensor * whole(ggml_tensor * x) const {
        const Host & h = host();
        ggml_tensor * xe = at(h.ggml_get_rows(ctx, x, index(batch.x_index)), 0);
        ggml_tensor * gate = has_gate(layer.activation.kind) ? project(Part::gate, layer.gate, xe, 1) : nullptr;
        ggml_tensor * act = activate(gate, project(Part::up, layer.up, xe, 2));
        // Without a bias the routing weight may come before the down projection, where rows are shorter.
        const bool is_early = !layer.down.bias.data && layer.n_ff() < layer.n_embd();
        if (is_early) act = weighted(act, gate ? 1 : 2);
        ggml_tensor * out = project(Part::down, layer.down, act, 0);
        if (!is_early) out = weighted(out, 0);
        ggml_tensor * so_far = at(h.ggml_get_rows(ctx, batch.y, index(batch.y_index)), 3);
        out = at(h.ggml_add(ctx, out, so_far), 0);
        return in_place(h.ggml_set_rows(ctx, batch.y, out, index(batch.y_index)));
    }
};

ggml_cgraph * ExpertGraph::build(const TensorContext & context, const SlotTensors & slot, const ExpertRows & rows) const {
    context.reset();
    ggml_cgraph * graph = host().ggml_new_graph_custom(context.get(), max_nodes, false);
    const Build b{*layer_, *batch_, context.get(), slot, rows};
    host().ggml_build_forward_expand(graph, b.whole(x_));
    return graph;
}

const ggml_tensor * ExpertGraph::unsupported(const Gpu & gpu, const TensorContext & context, const SlotTensors & slot) const {
    ggml_cgraph * graph = build(context, slot, {0, 0, std::min(batch_->shape.tile_rows, batch_->shape.n_index)});
    for (int i = 0; i < host().ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor * node = host().ggml_graph_node(graph, i);
        if (!gpu.supports(node)) return node;
    }
    return nullptr;
}

}  // namespace hybrid_moe
