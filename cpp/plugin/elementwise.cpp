// ADD, MUL, ADD_ID, GLU, UNARY, SQR, CLAMP, SCALE, CONT on F32, row by row.
#include "plugin/elementwise.h"

#include "plugin/describe.h"
#include "plugin/settings.h"
#include "threads/team.h"

#include <atomic>
#include <cmath>
#include <cstring>

namespace hybrid_moe {
namespace {

int64_t n_rows_of(const ggml_tensor * t) { return t->ne[1] * t->ne[2] * t->ne[3]; }

bool is_f32_rows(const ggml_tensor * t) { return t && t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float); }

bool same_shape(const ggml_tensor * a, const ggml_tensor * b) {
    for (int d = 0; d < 4; d++) {
        if (a->ne[d] != b->ne[d]) return false;
    }
    return true;
}

// Whether b repeats into a's shape, its rows whole or one value each.
bool repeats_into(const ggml_tensor * b, const ggml_tensor * a) {
    if (b->ne[0] != a->ne[0] && b->ne[0] != 1) return false;
    for (int d = 1; d < 4; d++) {
        if (b->ne[d] < 1 || a->ne[d] % b->ne[d] != 0) return false;
    }
    return true;
}

// The activation that a GLU or UNARY node is; false for those we do not have.
bool activation_of(const ggml_tensor * t, Activation & a) {
    a.alpha = param_f32(t, 2);
    a.limit = param_f32(t, 3);
    if (t->op == GGML_OP_UNARY) {
        switch (ggml_unary_op(t->op_params[0])) {
            case GGML_UNARY_OP_SILU: a.kind = Activation::silu; return true;
            case GGML_UNARY_OP_GELU: a.kind = Activation::gelu; return true;
            case GGML_UNARY_OP_RELU: a.kind = Activation::relu; return true;
            default: return false;
        }
    }
    switch (ggml_glu_op(t->op_params[0])) {
        case GGML_GLU_OP_SWIGLU:       a.kind = Activation::swiglu; return true;
        case GGML_GLU_OP_GEGLU:        a.kind = Activation::geglu; return true;
        case GGML_GLU_OP_REGLU:        a.kind = Activation::reglu; return true;
        case GGML_GLU_OP_SWIGLU_OAI:   a.kind = Activation::swiglu_oai; return true;
        case GGML_GLU_OP_SWIGLU_CLAMP: a.kind = Activation::swiglu_clamp; return true;
        default: return false;
    }
}

bool is_tanh_or_sigmoid(const ggml_tensor * t) {
    return t->op == GGML_OP_UNARY && (t->op_params[0] == GGML_UNARY_OP_TANH || t->op_params[0] == GGML_UNARY_OP_SIGMOID);
}

template <class T> T * row(const ggml_tensor * t, const int64_t (&i)[4]) {
    uint8_t * p = static_cast<uint8_t *>(t->data);
    for (int d = 1; d < 4; d++) p += (i[d] % t->ne[d]) * int64_t(t->nb[d]);
    return reinterpret_cast<T *>(p);
}

void compute_unary_row(const ggml_tensor * t, const float * a, int64_t n, float * out) {
    Activation activation;
    if (t->op == GGML_OP_SQR) {
        for (int64_t i = 0; i < n; i++) out[i] = a[i] * a[i];
    } else if (t->op == GGML_OP_CLAMP) {
        const float low = param_f32(t, 0), high = param_f32(t, 1);
        for (int64_t i = 0; i < n; i++) out[i] = a[i] < low ? low : a[i] > high ? high : a[i];
    } else if (t->op == GGML_OP_SCALE) {
        const float factor = param_f32(t, 0), offset = param_f32(t, 1);
        for (int64_t i = 0; i < n; i++) out[i] = a[i] * factor + offset;
    } else if (t->op == GGML_OP_CONT) {
        memmove(out, a, size_t(n) * sizeof(float));
    } else if (is_tanh_or_sigmoid(t)) {
        const bool tanh = t->op_params[0] == GGML_UNARY_OP_TANH;
        for (int64_t i = 0; i < n; i++) out[i] = tanh ? std::tanh(a[i]) : 1.0f / (1.0f + std::exp(-a[i]));
    } else if (activation_of(t, activation)) {
        settings().kernels->activate(activation, nullptr, a, n, out);
    }
}

void compute_row(const ggml_tensor * t, const int64_t (&i)[4], std::atomic<bool> & bad_id) {
    const int64_t n = t->ne[0];
    float * out = row<float>(t, i);
    const float * a = row<const float>(t->src[0], i);
    Activation activation;
    switch (t->op) {
        case GGML_OP_ADD:
        case GGML_OP_MUL: {
            const float * b = row<const float>(t->src[1], i);
            const int64_t step = t->src[1]->ne[0] == 1 ? 0 : 1;
            if (t->op == GGML_OP_ADD) {
                for (int64_t j = 0; j < n; j++) out[j] = a[j] + b[j * step];
            } else {
                for (int64_t j = 0; j < n; j++) out[j] = a[j] * b[j * step];
            }
            break;
        }
        case GGML_OP_ADD_ID: {
            const ggml_tensor * bias = t->src[1];
            const ggml_tensor * ids = t->src[2];
            int32_t id;
            memcpy(&id, static_cast<const uint8_t *>(ids->data) + i[1] * int64_t(ids->nb[0]) + i[2] * int64_t(ids->nb[1]), sizeof id);
            if (id < 0 || id >= bias->ne[1]) {
                bad_id.store(true);
                return;
            }
            const float * b = reinterpret_cast<const float *>(static_cast<const uint8_t *>(bias->data) + id * int64_t(bias->nb[1]));
            for (int64_t j = 0; j < n; j++) out[j] = a[j] + b[j];
            break;
        }
        case GGML_OP_GLU:
            activation_of(t, activation);
            settings().kernels->activate(activation, a, row<const float>(t->src[1], i), n, out);
            break;
        default:
            compute_unary_row(t, a, n, out);
    }
}

struct Rows {
    const ggml_tensor * node;
    std::atomic<int64_t> next{0};
    std::atomic<bool>    bad_id{false};
};

constexpr int64_t rows_at_once = 16;

void compute_rows(void * context, int, int) {
    Rows & rows = *static_cast<Rows *>(context);
    const ggml_tensor * t = rows.node;
    const int64_t n = n_rows_of(t);
    for (;;) {
        const int64_t first = rows.next.fetch_add(rows_at_once, std::memory_order_relaxed);
        if (first >= n) return;
        for (int64_t r = first; r < first + rows_at_once && r < n; r++) {
            compute_row(t, {0, r % t->ne[1], r / t->ne[1] % t->ne[2], r / t->ne[1] / t->ne[2]}, rows.bad_id);
        }
    }
}

}  // namespace

bool is_elementwise(const ggml_tensor * t) {
    const ggml_tensor * a = t->src[0];
    const ggml_tensor * b = t->src[1];
    if (!is_f32_rows(t) || !is_f32_rows(a) || !same_shape(t, a)) return false;
    Activation activation;
    switch (t->op) {
        case GGML_OP_ADD:
        case GGML_OP_MUL:    return is_f32_rows(b) && repeats_into(b, t);
        case GGML_OP_ADD_ID: return is_f32_rows(b) && b->ne[0] == t->ne[0] && t->src[2] && t->src[2]->type == GGML_TYPE_I32;
        case GGML_OP_GLU:    return is_f32_rows(b) && same_shape(a, b) && t->op_params[1] == 0 && activation_of(t, activation);
        case GGML_OP_UNARY:  return is_tanh_or_sigmoid(t) || activation_of(t, activation);
        case GGML_OP_SQR:
        case GGML_OP_CLAMP:
        case GGML_OP_SCALE:
        case GGML_OP_CONT:   return true;
        default:             return false;
    }
}

bool compute_elementwise(const ggml_tensor * node, int n_threads) {
    Rows rows{node};
    const int64_t n = (n_rows_of(node) + rows_at_once - 1) / rows_at_once;
    run_team(n < n_threads ? int(n) : n_threads, compute_rows, &rows);
    return !rows.bad_id.load();
}

}  // namespace hybrid_moe
