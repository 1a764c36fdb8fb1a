// Scales per expert: shapes checked once for claiming, running and fusing.
#include "plugin/expert_scale.h"

#include <cstring>

namespace hybrid_moe {
namespace {

bool is_f32_rows(const ggml_tensor * t) { return t && t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float); }

// [1, n_expert] repeated to [1, n_expert, n_tokens]. The source is a weight, seen through a RESHAPE or copied from
// another device.
bool is_repeat(const ggml_tensor * t) {
    if (t->op != GGML_OP_REPEAT || !is_f32_rows(t) || !is_f32_rows(t->src[0])) return false;
    const ggml_tensor * s = t->src[0];
    const bool is_weight = s->op == GGML_OP_NONE || (s->op == GGML_OP_RESHAPE && s->src[0] && s->src[0]->op == GGML_OP_NONE);
    return is_weight && s->ne[0] == 1 && s->ne[2] == 1 && s->ne[3] == 1 && t->ne[0] == 1 && t->ne[1] == s->ne[1] && t->ne[3] == 1;
}

// [1, n_used, n_tokens] out of it.
bool is_get_rows(const ggml_tensor * t) {
    if (t->op != GGML_OP_GET_ROWS || !is_f32_rows(t) || !t->src[0] || !is_repeat(t->src[0])) return false;
    const ggml_tensor * ids = t->src[1];
    return ids && ids->type == GGML_TYPE_I32 && t->ne[0] == 1 && t->ne[1] == ids->ne[0] && t->ne[2] == ids->ne[1] &&
           t->ne[2] == t->src[0]->ne[2] && ids->ne[2] == 1 && t->ne[3] == 1;
}

float * at(const ggml_tensor * t, int64_t i1, int64_t i2) {
    return reinterpret_cast<float *>(static_cast<uint8_t *>(t->data) + i1 * int64_t(t->nb[1]) + i2 * int64_t(t->nb[2]));
}

}  // namespace

bool is_expert_scale(const ggml_tensor * node) { return is_repeat(node) || is_get_rows(node); }

bool compute_expert_scale(const ggml_tensor * node) {
    const ggml_tensor * from = node->src[0];
    for (int64_t token = 0; token < node->ne[2]; token++) {
        for (int64_t i = 0; i < node->ne[1]; i++) {
            if (node->op == GGML_OP_REPEAT) {
                *at(node, i, token) = *at(from, i, 0);
                continue;
            }
            const ggml_tensor * ids = node->src[1];
            int32_t id;
            memcpy(&id, static_cast<const uint8_t *>(ids->data) + i * int64_t(ids->nb[0]) + token * int64_t(ids->nb[1]), sizeof id);
            if (id < 0 || id >= from->ne[1]) return false;
            *at(node, i, token) = *at(from, id, token);
        }
    }
    return true;
}

bool find_expert_scale(const ggml_tensor * mul, const ggml_tensor * ids, int64_t n_expert, ExpertScale & scale) {
    const ggml_tensor * chosen = mul->op == GGML_OP_MUL ? mul->src[1] : nullptr;
    if (!chosen || !is_get_rows(chosen) || chosen->src[1] != ids || chosen->src[0]->ne[1] != n_expert) return false;
    const ggml_tensor * s = chosen->src[0]->src[0];
    scale.data   = static_cast<const uint8_t *>(s->data);
    scale.stride = int64_t(s->nb[1]);
    return true;
}

}  // namespace hybrid_moe
