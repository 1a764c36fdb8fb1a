// A MoE layer in steady state allocates nothing, and its working memory does not grow with the number of experts.
#include "moe/moe_layer.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <vector>

namespace {
std::atomic<long> allocations{0};
}

void * operator new(std::size_t n) {
    allocations.fetch_add(1);
    if (void * p = malloc(n ? n : 1)) return p;
    throw std::bad_alloc();
}
void * operator new(std::size_t n, std::align_val_t align) {
    allocations.fetch_add(1);
    const std::size_t a = std::size_t(align);
    if (void * p = aligned_alloc(a, (n + a - 1) / a * a)) return p;
    throw std::bad_alloc();
}
void operator delete(void * p) noexcept { free(p); }
void operator delete(void * p, std::size_t) noexcept { free(p); }
void operator delete(void * p, std::align_val_t) noexcept { free(p); }
void operator delete(void * p, std::size_t, std::align_val_t) noexcept { free(p); }

using namespace hybrid_moe;

namespace {

constexpr int64_t n_embd = 96, n_ff = 64, n_used = 4;

void fail(const char * what) {
    puts(what);
    exit(1);
}

struct Model {
    std::vector<uint16_t> bf16;
    MoeLayer layer;

    explicit Model(int64_t n_expert) : bf16(size_t(3 * n_expert * n_embd * n_ff), 0x3C00) {
        const auto projection = [&](int which, int64_t rows, int64_t k) {
            Projection p;
            p.weights.name         = "test";
            p.weights.shape        = {};
            p.weights.shape.type   = WeightType::bf16;
            p.weights.shape.n_expert = n_expert;
            p.weights.shape.n_rows = rows;
            p.weights.shape.k      = k;
            p.weights.shape.row_bytes = size_t(k) * 2;
            p.weights.base         = reinterpret_cast<const uint8_t *>(bf16.data() + which * n_expert * n_embd * n_ff);
            p.weights.expert_bytes = size_t(rows * k) * 2;
            p.n_rows = rows;
            return p;
        };
        layer.gate = projection(0, n_ff, n_embd);
        layer.up   = projection(1, n_ff, n_embd);
        layer.down = projection(2, n_embd, n_ff);
    }
};

// Runs n_tokens tokens, which meet the same experts of any model, depending on `step`.
void run(Model & model, Workspace & work, int64_t n_tokens, int step, std::vector<float> & x, std::vector<int32_t> & ids, std::vector<float> & y) {
    MoeLayer & layer = model.layer;
    for (int64_t i = 0; i < n_tokens * n_used; i++) ids[size_t(i)] = int32_t((i / n_used * 7 + i % n_used * 3 + step) % 16);
    layer.ids.data         = reinterpret_cast<const uint8_t *>(ids.data());
    layer.ids.n_tokens     = n_tokens;
    layer.ids.n_used       = n_used;
    layer.ids.token_stride = n_used * 4;
    layer.ids.slot_stride  = 4;
    layer.x = reinterpret_cast<const uint8_t *>(x.data());
    layer.x_token_stride = layer.x_slot_stride = n_embd * 4;
    layer.y = reinterpret_cast<uint8_t *>(y.data());
    layer.y_token_stride = n_embd * 4;
    char error[512];
    const RunOptions options = {select_kernels(nullptr, error, sizeof error), 2, nullptr, nullptr};
    if (run_moe_layer(layer, options, work, error) != RunStatus::ok) fail(error);
}

}  // namespace

int main() {
    std::vector<float> x(512 * n_embd, 0.5f), y(512 * n_embd);
    std::vector<int32_t> ids(512 * n_used);
    size_t scratch[2];
    int i = 0;
    for (const int64_t n_expert : {16, 512}) {
        Model model(n_expert);
        Workspace work;
        for (int64_t n_tokens : {1, 4, 512}) {
            for (int step = 0; step < 20; step++) run(model, work, n_tokens, step, x, ids, y);  // the largest batch is seen
            const long before = allocations.load();
            for (int step = 0; step < 20; step++) run(model, work, n_tokens, step, x, ids, y);
            if (allocations.load() != before) fail("a layer in steady state allocated memory");
            if (n_tokens == 4) scratch[i] = work.scratch.size();
        }
        i++;
    }
    if (scratch[0] != scratch[1]) fail("working memory grew with the number of experts");
    puts("ok");
    return 0;
}
