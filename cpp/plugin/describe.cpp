// What we take of a graph, and how a MUL_MAT_ID node becomes an ExpertMatmul.
#include "plugin/describe.h"

#include "plugin/buffer.h"
#include "plugin/elementwise.h"
#include "plugin/expert_scale.h"
#include "plugin/settings.h"
#include "stream/streams.h"

#include <cstring>

namespace hybrid_moe {
namespace {

size_t row_bytes_of(WeightType type, int64_t k) { return size_t(k / group_len(type)) * group_bytes(type); }

// Null when our kernels run weights of that type and layout.
const char * refusal_of_weights(const ggml_tensor * w) {
    WeightType type;
    if (!weight_type_of(w->type, type)) return "no kernel for the weights' type";
    if (!worth_taking(*settings().kernels, type)) return "stock ggml is faster at the weights' type on this CPU";
    if (w->ne[3] != 1 || w->ne[0] % group_len(type) != 0) return "the weights' rows are no multiple of their group";
    if (w->nb[0] != group_bytes(type) || w->nb[1] != row_bytes_of(type, w->ne[0])) return "weight rows must be contiguous";
    return nullptr;
}

// Types that stock ggml's kernels keep, but whose long batches devices compute.
bool streams_as_foreign(const ggml_tensor * w, int64_t n_tokens) {
    return w->type != GGML_TYPE_I8 && Streams::get().may_stream(n_tokens) && Streams::get().takes_type(w->type) && w->ne[3] == 1 &&
           w->nb[1] == host().ggml_row_size(w->type, w->ne[0]);
}

// Null when the node is a MUL_MAT_ID that we can run, else the reason.
const char * refusal(const ggml_tensor * node) {
    const ggml_tensor * w   = node->src[0];
    const ggml_tensor * x   = node->src[1];
    const ggml_tensor * ids = node->src[2];
    if (!w || !x || !ids) return "a source is missing";
    if (const char * why = refusal_of_weights(w)) {
        if (!streams_as_foreign(w, x->ne[2])) return why;
    }
    if (x->type != GGML_TYPE_F32 || node->type != GGML_TYPE_F32) return "activations must be F32";
    if (ids->type != GGML_TYPE_I32) return "ids must be I32";
    if (x->nb[0] != sizeof(float) || node->nb[0] != sizeof(float)) return "activation rows must be contiguous";
    if (x->ne[0] != w->ne[0] || x->ne[1] < 1 || ids->ne[1] != x->ne[2]) return "shapes do not match";
    return nullptr;
}

ExpertIds ids_of(const ggml_tensor * ids) {
    return {static_cast<const uint8_t *>(ids->data), int64_t(ids->nb[1]), int64_t(ids->nb[0]), ids->ne[1], ids->ne[0]};
}

// Whether a value is made of the output of expert projections in our buffers, and of per-row factors: such nodes belong
// to the block, whatever backend its inputs come from. Follows the chain of first sources; an ADD must have both sides
// in it (the sum over experts, and not the residual after it).
bool stems_from_experts(const ggml_tensor * t) {
    while (t) {
        switch (t->op) {
            case GGML_OP_MUL_MAT_ID:
                return refusal(t) == nullptr && is_our_buffer(t->src[0]->buffer);
            case GGML_OP_ADD:
                if (!t->src[1] || !stems_from_experts(t->src[1])) return false;
                t = t->src[0];
                break;
            case GGML_OP_MUL:
                if (!t->src[1] || (t->src[1]->ne[0] != 1 && !stems_from_experts(t->src[1]))) return false;
                t = t->src[0];
                break;
            case GGML_OP_GLU:
                if (t->src[1] && !stems_from_experts(t->src[1])) return false;
                t = t->src[0];
                break;
            case GGML_OP_VIEW:
            case GGML_OP_ADD_ID:
            case GGML_OP_UNARY:
            case GGML_OP_SQR:
            case GGML_OP_CLAMP:
            case GGML_OP_SCALE:
            case GGML_OP_CONT:
                t = t->src[0];
                break;
            default:
                return false;
        }
    }
    return false;
}

}  // namespace

bool takes_op(const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_NONE:
        case GGML_OP_RESHAPE:
        case GGML_OP_VIEW:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE:
            return true;  // nothing to compute
        case GGML_OP_MUL_MAT_ID:
            return refusal(op) == nullptr;
        case GGML_OP_REPEAT:
        case GGML_OP_GET_ROWS:
            return is_expert_scale(op);
        default:
            return is_elementwise(op) && stems_from_experts(op);
    }
}

float param_f32(const ggml_tensor * t, int i) {
    float f;
    memcpy(&f, &t->op_params[i], sizeof f);
    return f;
}

ExpertWeights weights_of(const ggml_tensor * w) {
    ExpertWeights e;
    e.name = w->name;
    if (refusal_of_weights(w) || !weight_type_of(w->type, e.shape.type)) e.shape.type = WeightType::foreign;
    e.host_type       = w->type;
    e.end_is_told     = is_our_buffer(w->buffer);
    e.shape.n_expert  = w->ne[2];
    e.shape.n_rows    = w->ne[1];
    e.shape.k         = w->ne[0];
    e.shape.row_bytes = w->nb[1];
    e.base            = static_cast<const uint8_t *>(w->data);
    e.expert_bytes    = w->nb[2];
    e.scattered       = experts_behind(w);
    return e;
}

const char * describe_matmul(const ggml_tensor * node, ExpertMatmul & out) {
    if (const char * why = refusal(node)) return why;
    const ggml_tensor * w   = node->src[0];
    const ggml_tensor * x   = node->src[1];
    const ggml_tensor * ids = node->src[2];
    out.experts = weights_of(w);
    const ExpertWeights & e = out.experts;
    if (e.shape.type == WeightType::fp8_e4m3 && !e.scattered) {
        return "an I8 tensor whose FP8 scales are unknown: load the model through hybrid_moe_ext";
    }
    out.ids              = ids_of(ids);
    out.x                = static_cast<const uint8_t *>(x->data);
    out.n_x_slots        = x->ne[1];
    out.x_token_stride   = int64_t(x->nb[2]);
    out.x_slot_stride    = int64_t(x->nb[1]);
    out.y                = static_cast<uint8_t *>(node->data);
    out.y_token_stride   = int64_t(node->nb[2]);
    out.y_slot_stride    = int64_t(node->nb[1]);
    return nullptr;
}

}  // namespace hybrid_moe
