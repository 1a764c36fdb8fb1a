// PretendCpu.
#include "moe/pretend_cpu.h"

#include <atomic>
#include <cstring>

namespace hybrid_moe {
namespace {

// Short batches are one piece of work; others are handed over expert by expert, so that they wait for one another as tiles do.
constexpr int64_t few_tokens = 32;

std::atomic<PretendCpu> pretended{nullptr};

size_t expert_bytes(const MoeLayer & layer) {
    size_t n = 0;
    for (const Projection * p : {&layer.gate, &layer.up, &layer.down}) {
        if (p == &layer.gate && !has_gate(layer.activation.kind)) continue;
        n += size_t(p->n_rows) * p->weights.shape.row_bytes;
    }
    return n;
}

double bits_per_weight(const MoeLayer & layer) {
    const auto & shape = layer.down.weights.shape;
    return double(shape.row_bytes) * 8 / double(shape.k);
}

}  // namespace

void pretend_cpu(PretendCpu f) { pretended.store(f); }
PretendCpu pretended_cpu() { return pretended.load(std::memory_order_relaxed); }

void pretend_moe_layer(PretendCpu f, const MoeLayer & layer, const Routing & route) {
    const size_t n_bytes = expert_bytes(layer);
    const double bits    = bits_per_weight(layer);
    for (int64_t t = 0; t < layer.ids.n_tokens; t++) memset(layer.y + t * layer.y_token_stride, 0, size_t(layer.n_embd()) * sizeof(float));
    if (layer.ids.n_tokens < few_tokens) {
        const int64_t n = int64_t(route.active.size());
        if (n) f((int64_t(route.pairs.size()) + n - 1) / n, n_bytes * size_t(n), bits);
        return;
    }
    for (const int64_t e : route.active) f(route.n_rows(e), n_bytes, bits);
}

}  // namespace hybrid_moe
