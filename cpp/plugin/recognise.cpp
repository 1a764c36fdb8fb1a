// recognise_layer: from the down projection back to the activation and its inputs, then forward to the sum.
#include "plugin/recognise.h"

#include "plugin/describe.h"
#include "plugin/expert_scale.h"

#include <cstring>
#include <vector>

namespace hybrid_moe {
namespace {

// A graph's nodes from `first` on, and which of them the block has accounted for.
class Block {
public:
    Block(ggml_cgraph * graph, int first) : graph_(graph), first_(first), n_(host().ggml_graph_n_nodes(graph)) {}

    const ggml_tensor * node(int i) const { return i < n_ ? host().ggml_graph_node(graph_, i) : nullptr; }
    int first() const { return first_; }

    // Accounts for a tensor. Returns true, to end a search with; whether it is a node in place, is_whole() asks.
    bool use(const ggml_tensor * t) {
        used_.push_back(t);
        return true;
    }

    // Whether nodes [first, end) are exactly what was used, all to be computed, none but the last wanted by others.
    bool is_whole(int end) const {
        size_t n_found = 0;
        for (int i = first_; i < end; i++) {
            const ggml_tensor * t = node(i);
            if (is_seen_weight(t)) continue;
            bool mine = false;
            for (const ggml_tensor * u : used_) mine = mine || u == t;
            if (!mine || !(t->flags & GGML_TENSOR_FLAG_COMPUTE)) return false;
            if (i + 1 < end && (t->flags & GGML_TENSOR_FLAG_OUTPUT)) return false;
            n_found++;
        }
        return n_found == used_.size();
    }

    // The index of the first node from i on that computes something, or whose value does: a RESHAPE of a weight may stand
    // anywhere.
    int skip_seen_weights(int i) const {
        while (node(i) && is_seen_weight(node(i))) i++;
        return i;
    }

private:
    static bool is_seen_weight(const ggml_tensor * t) {
        return t->op == GGML_OP_RESHAPE && t->src[0] && t->src[0]->op == GGML_OP_NONE;
    }

    ggml_cgraph *                    graph_;
    int                              first_;
    int                              n_;
    std::vector<const ggml_tensor *> used_;
};

struct Found {
    const ggml_tensor * matmul = nullptr;
    const ggml_tensor * x      = nullptr;
    const ggml_tensor * ids    = nullptr;
};

bool bias_of(const ggml_tensor * add_id, const ggml_tensor * ids, ExpertBias & out) {
    const ggml_tensor * b = add_id->src[1];
    if (!b || b->type != GGML_TYPE_F32 || b->nb[0] != sizeof(float) || add_id->src[2] != ids) return false;
    out.data   = static_cast<const uint8_t *>(b->data);
    out.stride = int64_t(b->nb[1]);
    return true;
}

// Accounts for the nodes of a scale per expert.
void use_scale(Block & block, const ggml_tensor * mul) {
    block.use(mul);
    block.use(mul->src[1]);
    block.use(mul->src[1]->src[0]);
}

// t = [VIEW of] [ADD_ID of] [MUL by a scale per expert of] MUL_MAT_ID, each step optional but the last.
bool find_projection(Block & block, const ggml_tensor * t, Projection & out, Found & found) {
    int64_t row0 = 0;
    const int64_t n_rows = t->ne[0];
    const ggml_tensor * view = nullptr;
    if (t->op == GGML_OP_VIEW) {
        view = t;
        row0 = int64_t(t->view_offs / sizeof(float));
        t = t->src[0];
        if (!t || view->ne[1] != t->ne[1] || view->ne[2] != t->ne[2] || view->nb[1] != t->nb[1] || view->nb[2] != t->nb[2] ||
            row0 + n_rows > t->ne[0]) {
            return false;
        }
    }
    const ggml_tensor * add_id = nullptr;
    if (t->op == GGML_OP_ADD_ID) {
        add_id = t;
        t = t->src[0];
    }
    const ggml_tensor * mul = nullptr;
    if (t->op == GGML_OP_MUL) {
        mul = t;
        t = t->src[0];
    }
    ExpertMatmul m;
    if (t->op != GGML_OP_MUL_MAT_ID || describe_matmul(t, m)) return false;
    if (mul && !find_expert_scale(mul, t->src[2], m.experts.shape.n_expert, out.scale)) return false;
    if (found.x && (found.x != t->src[1] || found.ids != t->src[2])) return false;
    if (add_id && !bias_of(add_id, t->src[2], out.bias)) return false;
    if (out.bias.data) out.bias.data += row0 * int64_t(sizeof(float));
    const bool again = found.matmul == t;  // the other half of a merged tensor: its nodes are accounted for
    if (view) block.use(view);
    if (!again && add_id) block.use(add_id);
    if (!again && mul) use_scale(block, mul);
    if (!again) block.use(t);
    out.weights = m.experts;
    out.row0    = row0;
    out.n_rows  = n_rows;
    found = {t, t->src[1], t->src[2]};
    return row0 + n_rows <= m.experts.shape.n_rows;
}

// CLAMP of `t`'s source to [low, limit]; returns the source.
const ggml_tensor * clamped(const ggml_tensor * t, bool symmetric, float & limit) {
    if (t->op != GGML_OP_CLAMP) return nullptr;
    limit = param_f32(t, 1);
    const float low = param_f32(t, 0);
    return (symmetric ? low == -limit : low == -__builtin_inff()) ? t->src[0] : nullptr;
}

// What the activation's node computes, and from which tensors.
struct Inputs {
    const ggml_tensor * gate = nullptr;
    const ggml_tensor * up   = nullptr;
};

bool find_glu(Block & block, const ggml_tensor * t, Activation & a, Inputs & in) {
    if (!t->src[1] || t->op_params[1] != 0) return false;  // one packed or swapped input: llama.cpp builds none
    switch (ggml_glu_op(t->op_params[0])) {
        case GGML_GLU_OP_SWIGLU:       a.kind = Activation::swiglu; break;
        case GGML_GLU_OP_GEGLU:        a.kind = Activation::geglu; break;
        case GGML_GLU_OP_REGLU:        a.kind = Activation::reglu; break;
        case GGML_GLU_OP_SWIGLU_OAI:   a.kind = Activation::swiglu_oai; break;
        case GGML_GLU_OP_SWIGLU_CLAMP: a.kind = Activation::swiglu_clamp; break;
        default: return false;
    }
    a.alpha = param_f32(t, 2);
    a.limit = param_f32(t, 3);
    in = {t->src[0], t->src[1]};
    return block.use(t);
}

bool find_unary(Block & block, const ggml_tensor * t, Activation & a, Inputs & in) {
    switch (ggml_unary_op(t->op_params[0])) {
        case GGML_UNARY_OP_SILU: a.kind = Activation::silu; break;
        case GGML_UNARY_OP_GELU: a.kind = Activation::gelu; break;
        case GGML_UNARY_OP_RELU: a.kind = Activation::relu; break;
        default: return false;
    }
    in = {nullptr, t->src[0]};
    return block.use(t);
}

// MUL(CLAMP(SILU(gate)), CLAMP(up))
bool find_limited(Block & block, const ggml_tensor * t, Activation & a, Inputs & in) {
    const ggml_tensor * c0 = t->src[0];
    const ggml_tensor * c1 = t->src[1];
    float limit_gate = 0.0f;
    float limit_up = 0.0f;
    const ggml_tensor * silu = c0 ? clamped(c0, false, limit_gate) : nullptr;
    const ggml_tensor * up   = c1 ? clamped(c1, true, limit_up) : nullptr;
    if (!silu || !up || silu->op != GGML_OP_UNARY || silu->op_params[0] != GGML_UNARY_OP_SILU || limit_gate != limit_up) return false;
    a.kind  = Activation::swiglu_limited;
    a.limit = limit_gate;
    in = {silu->src[0], up};
    return block.use(t) && block.use(c0) && block.use(c1) && block.use(silu);
}

bool find_activation(Block & block, const ggml_tensor * t, Activation & a, Inputs & in) {
    switch (t->op) {
        case GGML_OP_GLU:   return find_glu(block, t, a, in);
        case GGML_OP_UNARY: return find_unary(block, t, a, in);
        case GGML_OP_MUL:   return find_limited(block, t, a, in);
        case GGML_OP_SQR:
            if (!t->src[0] || t->src[0]->op != GGML_OP_UNARY || !find_unary(block, t->src[0], a, in)) return false;
            if (a.kind != Activation::relu) return false;
            a.kind = Activation::relu_squared;
            return block.use(t);
        default: return false;
    }
}

// The down projection that belongs to the matmul at `first`: the next MUL_MAT_ID that reads no other matmul's input.
int find_down(const Block & block) {
    const ggml_tensor * x = block.node(block.first())->src[1];
    for (int i = block.first() + 1; i < block.first() + 24; i++) {
        const ggml_tensor * t = block.node(i);
        if (!t) return -1;
        if (t->op == GGML_OP_MUL_MAT_ID && t->src[1] != x) return i;
    }
    return -1;
}

bool set_weights(const ggml_tensor * w, MoeLayer & layer) {
    if (!w || w->type != GGML_TYPE_F32 || w->ne[0] != 1 || w->ne[1] != layer.ids.n_used || w->ne[2] != layer.ids.n_tokens || w->ne[3] != 1) {
        return false;
    }
    layer.weights              = static_cast<const uint8_t *>(w->data);
    layer.weights_slot_stride  = int64_t(w->nb[1]);
    layer.weights_token_stride = int64_t(w->nb[2]);
    return true;
}

// From the node after the down projection to the sum; returns the index after it, or -1.
int find_sum(Block & block, int i, const ggml_tensor * t, MoeLayer & layer) {
    const ggml_tensor * ids = block.node(block.first())->src[2];
    const ggml_tensor * next = block.node(i = block.skip_seen_weights(i));
    if (next && next->op == GGML_OP_REPEAT) {
        const ggml_tensor * mul = block.node(i += 2);
        if (!mul || mul->src[0] != t || !find_expert_scale(mul, ids, layer.down.weights.shape.n_expert, layer.down.scale)) return -1;
        use_scale(block, t = mul);
        next = block.node(++i);
    }
    if (next && next->op == GGML_OP_ADD_ID && next->src[0] == t) {
        if (!bias_of(next, ids, layer.down.bias)) return -1;
        block.use(t = next);
        next = block.node(++i);
    }
    if (next && next->op == GGML_OP_MUL && next->src[0] == t && set_weights(next->src[1], layer)) {
        block.use(t = next);
        i++;
    }
    std::vector<const ggml_tensor *> views;
    for (int64_t s = 0; s < layer.ids.n_used; s++, i++) {
        const ggml_tensor * v = block.node(i);
        if (!v || v->op != GGML_OP_VIEW || v->src[0] != t || v->view_offs != size_t(s) * t->nb[1] || v->ne[0] != t->ne[0] ||
            v->ne[1] != t->ne[2] || v->ne[2] != 1 || v->nb[1] != t->nb[2]) {
            return -1;
        }
        block.use(v);
        views.push_back(v);
    }
    const ggml_tensor * sum = views.at(0);
    if (views.size() == 1) {
        const ggml_tensor * cont = block.node(i++);
        if (!cont || cont->op != GGML_OP_CONT || cont->src[0] != sum) return -1;
        block.use(sum = cont);
    }
    for (size_t s = 1; s < views.size(); s++, i++) {
        const ggml_tensor * add = block.node(i);
        if (!add || add->op != GGML_OP_ADD || add->src[0] != sum || add->src[1] != views[s]) return -1;
        block.use(sum = add);
    }
    if (sum->type != GGML_TYPE_F32 || sum->nb[0] != sizeof(float) || sum->ne[0] != t->ne[0] || sum->ne[1] != layer.ids.n_tokens) return -1;
    layer.y              = static_cast<uint8_t *>(sum->data);
    layer.y_token_stride = int64_t(sum->nb[1]);
    return i;
}

bool shapes_agree(const MoeLayer & layer) {
    const auto & up = layer.up.weights.shape;
    const auto & down = layer.down.weights.shape;
    if (layer.up.n_rows != down.k || up.n_expert != down.n_expert) return false;
    if (!has_gate(layer.activation.kind)) return true;
    const auto & gate = layer.gate.weights.shape;
    return layer.gate.n_rows == layer.up.n_rows && gate.n_expert == up.n_expert && gate.k == up.k;
}

}  // namespace

int recognise_layer(ggml_cgraph * graph, int first, MoeLayer & layer) {
    Block block(graph, first);
    const int i_down = find_down(block);
    if (i_down < 0) return 0;
    const ggml_tensor * down = block.node(i_down);
    Found down_found;
    Found in_found;
    Inputs in;
    layer = MoeLayer{};
    if (!find_projection(block, down, layer.down, down_found) || layer.down.row0 != 0) return 0;
    if (!down->src[1] || !find_activation(block, down->src[1], layer.activation, in)) return 0;
    if (!in.up || !find_projection(block, in.up, layer.up, in_found)) return 0;
    if (in.gate && !find_projection(block, in.gate, layer.gate, in_found)) return 0;
    if (in_found.ids != down_found.ids) return 0;
    ExpertMatmul m;
    if (describe_matmul(in_found.matmul, m)) return 0;
    layer.ids            = m.ids;
    layer.x              = m.x;
    layer.n_x_slots      = m.n_x_slots;
    layer.x_token_stride = m.x_token_stride;
    layer.x_slot_stride  = m.x_slot_stride;
    if (layer.ids.n_used < 1 || !shapes_agree(layer)) return 0;
    const int end = find_sum(block, i_down + 1, down, layer);
    return end > 0 && block.is_whole(end) ? end - first : 0;
}

}  // namespace hybrid_moe
