// Flops and bytes per op. Matrix products and attention are counted; every other op is one flop per element of its result,
// so that its bytes decide.
#include "cost.h"

#include "plugin/host.h"

#include <algorithm>
#include <cmath>

namespace simgpu {
namespace {

double n_elements(const ggml_tensor * t) { return double(t->ne[0]) * double(t->ne[1]) * double(t->ne[2]) * double(t->ne[3]); }

double n_bytes(const ggml_tensor * t) { return t ? double(hybrid_moe::host().ggml_nbytes(t)) : 0; }

// Only the experts that can have been chosen are read. Which ones were is not known when the model charges; that each
// row chose another one is the case it assumes.
double bytes_of_experts(const ggml_tensor * node) {
    const ggml_tensor * experts = node->src[0];
    const double n_choices = n_elements(node->src[2]);
    return std::min(double(experts->ne[2]), n_choices) * double(experts->nb[2]);
}

}  // namespace

bool launches(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_NONE:
        case GGML_OP_RESHAPE:
        case GGML_OP_VIEW:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE: return false;
        default:                return (node->flags & GGML_TENSOR_FLAG_COMPUTE) != 0 && n_elements(node) > 0;
    }
}

double flops_of(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_MUL_MAT:
        case GGML_OP_MUL_MAT_ID: return 2.0 * n_elements(node) * double(node->src[0]->ne[0]);
        case GGML_OP_OUT_PROD:   return 2.0 * n_elements(node) * double(node->src[0]->ne[1]);
        case GGML_OP_FLASH_ATTN_EXT: {
            const ggml_tensor * q = node->src[0];  // [n_embd_k, n_tokens, n_head, n_seq]
            const ggml_tensor * k = node->src[1];  // [n_embd_k, n_kv, n_head_kv, n_seq]
            const ggml_tensor * v = node->src[2];  // [n_embd_v, n_kv, n_head_kv, n_seq]
            const double n_rows = double(q->ne[1]) * double(q->ne[2]) * double(q->ne[3]);
            return 2.0 * n_rows * double(k->ne[1]) * double(k->ne[0] + v->ne[0]);
        }
        default: return n_elements(node);
    }
}

double bytes_of(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_GET_ROWS: return 2.0 * n_bytes(node) + n_bytes(node->src[1]);  // the rows asked for, not the table
        case GGML_OP_SET_ROWS: return 2.0 * n_bytes(node->src[0]) + n_bytes(node->src[1]);
        case GGML_OP_MUL_MAT_ID:
            return bytes_of_experts(node) + n_bytes(node->src[1]) + n_bytes(node->src[2]) + n_bytes(node);
        default: break;
    }
    double sum = n_bytes(node);
    for (const ggml_tensor * source : node->src) sum += n_bytes(source);
    return sum;
}

int64_t modelled_ns(const ggml_tensor * node, const DeviceSettings & s) {
    if (!launches(node)) return 0;
    const double compute_ns = flops_of(node) / (s.tflops * 1e3);  // 1 TFLOP/s is 1000 flops per nanosecond
    const double memory_ns  = bytes_of(node) / s.memory_gbps;
    return std::llround(std::max(compute_ns, memory_ns) * s.slow + s.launch_us * 1e3);
}

}  // namespace simgpu
