// Runs a MoeLayer on the CPU team. Two kinds of tiles, taken in one order by whichever thread is free:
//   1. (expert, rows of gate and up): h for all token rows of that expert
//   2. (rows of down): y for all tokens of the tile, expert after expert
// Of each kind a thread takes those first whose weights are on its NUMA node (lanes.h).
// Tiles of kind 2 wait for the experts they read, one by one, and for no barrier. All tiles of kind 1 are taken before
// any of kind 2, so somebody is always working on what a waiting thread waits for.
#include "moe/moe_layer.h"
#include "moe/pretend_cpu.h"
#include "threads/team.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>

namespace hybrid_moe {
namespace {

// Token rows that are processed at once: bounds h (pairs x n_ff floats) whatever the batch. Large enough that with 256
// experts and 8 per token an expert still meets 64 rows, which amortise the expansion of its weights.
constexpr int64_t token_tile = 2048;

// How many tiles a thread should get of each kind, so that the last one to finish is short.
constexpr int64_t tiles_per_thread = 12;

struct Plan {
    int     n_threads;
    int64_t up_rows;    // rows per tile of kind 1
    int64_t down_rows;  // rows per tile of kind 2
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whole panels, so that about n_tiles tiles (at least 1) cover n_rows.
int64_t rows_per_tile(int64_t n_rows, int64_t n_tiles) {
    return ceil_div(ceil_div(n_rows, n_tiles), gemm_panel_rows) * gemm_panel_rows;
}

// A tile's results, rows x the token rows of an expert, stay below this where the batch allows: they are read again at once.
constexpr int64_t tile_floats = 256 << 10;

int64_t at_most_rows(int64_t m_max) {
    const int64_t rows = tile_floats / (m_max < 1 ? 1 : m_max) / gemm_panel_rows * gemm_panel_rows;
    return rows < 4 * gemm_panel_rows ? 4 * gemm_panel_rows : rows;  // lower tiles would gather the same tokens too often
}

Plan decide(const MoeLayer & layer, const Routing & route, int64_t m_max, int n_threads) {
    Plan plan;
    const int64_t n_active = int64_t(route.active.size());
    const int64_t wanted = tiles_per_thread * int64_t(n_threads);
    plan.n_threads = n_threads;
    plan.up_rows   = std::min(rows_per_tile(layer.n_ff(), n_active ? ceil_div(wanted, n_active) : 1), at_most_rows(m_max));
    plan.down_rows = std::min(rows_per_tile(layer.n_embd(), wanted), at_most_rows(m_max));
    return plan;
}

size_t round_up(size_t n_floats) { return (n_floats + 15) / 16 * 16; }

// Memory of one run, cut out of the workspace: h, and per thread what gemm needs and a tile of results.
struct Scratch {
    float * h;           // [pairs][n_ff], in the order of the routing
    float * threads;
    size_t  per_thread;  // floats

    float * gemm(int i_thread) const { return threads + size_t(i_thread) * per_thread; }
    float * tile(int i_thread) const { return gemm(i_thread) + gemm_scratch_bytes / sizeof(float); }
};

Scratch cut(std::vector<uint8_t> & bytes, const MoeLayer & layer, const Plan & plan, size_t n_pairs, int64_t m_max) {
    Scratch s;
    s.per_thread = gemm_scratch_bytes / sizeof(float) + round_up(size_t(m_max * std::max(plan.up_rows, plan.down_rows)));
    const size_t h_floats = round_up(n_pairs * size_t(layer.n_ff()));
    const size_t needed = (h_floats + s.per_thread * size_t(plan.n_threads)) * sizeof(float) + 64;
    if (bytes.size() < needed) bytes.resize(needed);
    s.h       = reinterpret_cast<float *>((uintptr_t(bytes.data()) + 63) & ~uintptr_t(63));
    s.threads = s.h + h_floats;
    return s;
}

// Shared by the threads of one token tile.
struct Run {
    const MoeLayer &   layer;
    const Plan &       plan;
    const RunOptions & options;
    Workspace &        work;
    Scratch            scratch;
    int64_t            m_max;
    std::atomic<bool>    aborted{false};
    Turn                 turn;
};

// Rows [row0, row1) of a projection for m token rows of one expert, to `out`: m rows, `stride` floats apart.
void project(Run & run, const Projection & p, int64_t i_expert, int64_t row0, int64_t row1, const float * const * x,
             int64_t m, float * out, int64_t stride, int i_thread) {
    float ** y = run.work.tile_y.data() + int64_t(i_thread) * run.m_max;
    for (int64_t j = 0; j < m; j++) y[j] = out + j * stride - (p.row0 + row0);  // kernels index y by the matrix's row
    multiply(*run.options.kernels, p.weights, i_expert, p.row0 + row0, p.row0 + row1, {x, y, m},
             run.scratch.gemm(i_thread));
    const int64_t n = row1 - row0;
    const float scale = p.scale.of(i_expert);
    for (int64_t j = 0; p.scale.data && j < m; j++) {
        for (int64_t i = 0; i < n; i++) out[j * stride + i] *= scale;
    }
    const float * bias = p.bias.of(i_expert);
    for (int64_t j = 0; bias && j < m; j++) run.options.kernels->accumulate(1.0f, bias + row0, n, out + j * stride);
}

void up_tile(Run & run, int64_t i_active, RowTile tile, int i_thread) {
    const MoeLayer & layer = run.layer;
    const Routing & route = run.work.routing;
    const int64_t i_expert = route.active[size_t(i_active)];
    const int64_t begin = route.begin[size_t(i_expert)];
    const int64_t m = route.n_rows(i_expert);
    const auto [row0, row1] = tile;
    const int64_t n = row1 - row0;
    float * h  = run.scratch.h + begin * layer.n_ff() + row0;  // holds the gate's rows first
    float * up = run.scratch.tile(i_thread);
    const float * const * x = run.work.x.data() + begin;
    if (has_gate(layer.activation.kind)) project(run, layer.gate, i_expert, row0, row1, x, m, h, layer.n_ff(), i_thread);
    project(run, layer.up, i_expert, row0, row1, x, m, up, n, i_thread);
    for (int64_t j = 0; j < m; j++) {
        float * row = h + j * layer.n_ff();
        run.options.kernels->activate(layer.activation, row, up + j * n, n, row);
    }
    run.work.up_done[size_t(i_active)].fetch_add(1, std::memory_order_release);
}

bool wait_for_expert(const Run & run, int64_t i_active) {
    while (run.work.up_done[size_t(i_active)].load(std::memory_order_acquire) < run.work.up_tiles.n_tiles()) {
        if (run.aborted.load(std::memory_order_relaxed)) return false;
        spin_once();
    }
    return true;
}

void down_tile(Run & run, RowTile tile, int i_thread) {
    const MoeLayer & layer = run.layer;
    const Routing & route = run.work.routing;
    const auto [row0, row1] = tile;
    const int64_t n = row1 - row0;
    float * out = run.scratch.tile(i_thread);
    for (float * y : run.work.token_y) memset(y + row0, 0, size_t(n) * sizeof(float));
    for (int64_t i = 0; i < int64_t(route.active.size()); i++) {
        if (!wait_for_expert(run, i)) return;
        const int64_t i_expert = route.active[size_t(i)];
        const int64_t begin = route.begin[size_t(i_expert)];
        const int64_t m = route.n_rows(i_expert);
        project(run, layer.down, i_expert, row0, row1, run.work.h.data() + begin, m, out, n, i_thread);
        for (int64_t j = 0; j < m; j++) {
            const size_t pair = size_t(begin + j);
            run.options.kernels->accumulate(run.work.pair_weight[pair], out + j * n, n,
                                            run.work.token_y[size_t(route.pairs[pair].token)] + row0);
        }
    }
}

// All tiles are taken, and taken tiles are finished before the team returns.
bool is_done(const Run & run) {
    return run.aborted.load() || (run.work.up_tiles.is_empty() && run.work.down_tiles.is_empty());
}

void compute_tiles(void * context, int i_thread, int) {
    Run & run = *static_cast<Run *>(context);
    const int lane = run.work.up_tiles.has_nodes() || run.work.down_tiles.has_nodes() ? node_here() : 0;
    for (;;) {
        // Whoever took a tile finishes it, so leaving here keeps nobody waiting.
        if (run.turn.is_over() || run.aborted.load(std::memory_order_relaxed)) return;
        if (must_abort(run.options, i_thread)) {
            run.aborted.store(true);
            return;
        }
        int64_t i_active;
        RowTile tile;
        if (run.work.up_tiles.take(lane, i_active, tile)) {
            up_tile(run, i_active, tile, i_thread);
        } else if (run.work.down_tiles.take(lane, i_active, tile)) {
            down_tile(run, tile, i_thread);
        } else {
            return;
        }
    }
}

// A strided input of [n_tokens][n_slots] rows of n_bytes; copied when y would overwrite it before it is read.
struct Input {
    const uint8_t ** data;
    int64_t *        token_stride;
    int64_t *        slot_stride;
    int64_t          n_slots;
    int64_t          n_bytes;
};

void protect(const MoeLayer & layer, const Input & in, std::vector<uint8_t> & copy) {
    if (!*in.data || layer.ids.n_tokens == 0) return;
    const uint8_t * y_end = layer.y + (layer.ids.n_tokens - 1) * layer.y_token_stride + layer.n_embd() * int64_t(sizeof(float));
    const uint8_t * in_end = *in.data + (layer.ids.n_tokens - 1) * *in.token_stride + (in.n_slots - 1) * *in.slot_stride + in.n_bytes;
    if (in_end <= layer.y || y_end <= *in.data) return;
    copy.resize(size_t(layer.ids.n_tokens * in.n_slots * in.n_bytes));
    for (int64_t t = 0; t < layer.ids.n_tokens; t++) {
        for (int64_t s = 0; s < in.n_slots; s++) {
            memcpy(copy.data() + (t * in.n_slots + s) * in.n_bytes, *in.data + t * *in.token_stride + s * *in.slot_stride, size_t(in.n_bytes));
        }
    }
    *in.data         = copy.data();
    *in.slot_stride  = in.n_bytes;
    *in.token_stride = in.n_slots * in.n_bytes;
}

// Pointers of one token tile, in the order of its routing.
void gather(const MoeLayer & layer, int64_t token0, int64_t n_tokens, const Scratch & scratch, Workspace & work) {
    const Routing & route = work.routing;
    work.x.resize(route.pairs.size());
    work.h.resize(route.pairs.size());
    work.pair_weight.resize(route.pairs.size());
    work.token_y.resize(size_t(n_tokens));
    for (int64_t t = 0; t < n_tokens; t++) {
        work.token_y[size_t(t)] = reinterpret_cast<float *>(layer.y + (token0 + t) * layer.y_token_stride);
    }
    for (size_t i = 0; i < route.pairs.size(); i++) {
        const Pair p = route.pairs[i];
        const int64_t token = token0 + p.token;
        work.x[i] = reinterpret_cast<const float *>(layer.x + token * layer.x_token_stride + p.slot % layer.n_x_slots * layer.x_slot_stride);
        work.h[i] = scratch.h + i * size_t(layer.n_ff());
        work.pair_weight[i] = 1.0f;
        if (layer.weights) {
            memcpy(&work.pair_weight[i], layer.weights + token * layer.weights_token_stride + p.slot * layer.weights_slot_stride, sizeof(float));
        }
    }
}

const char * make_layer_ready(const MoeLayer & layer, const Routing & route, const RunOptions & options) {
    const char * what = nullptr;
    if (has_gate(layer.activation.kind)) what = make_experts_ready(layer.gate.weights, route, options);
    if (!what) what = make_experts_ready(layer.up.weights, route, options);
    if (!what) what = make_experts_ready(layer.down.weights, route, options);
    return what;
}

RunStatus run_token_tile(const MoeLayer & layer, int64_t token0, int64_t n_tokens, const RunOptions & options, Workspace & work, char * error,
                         const std::vector<char> * only) {
    ExpertIds ids = layer.ids;
    ids.data += token0 * ids.token_stride;
    ids.n_tokens = n_tokens;
    Routing & route = work.routing;
    Pair bad;
    if (!group_by_expert(ids, layer.down.weights.shape.n_expert, route, bad)) {
        describe_bad_id(layer.down.weights, ids, bad, error);
        return RunStatus::failed;
    }
    if (only) keep_experts(route, *only);
    if (const PretendCpu pretend = pretended_cpu()) {
        MoeLayer tile = layer;
        tile.ids = ids;
        tile.y += token0 * layer.y_token_stride;
        pretend_moe_layer(pretend, tile, route);
        return RunStatus::ok;
    }
    if (const char * what = make_layer_ready(layer, route, options)) {
        snprintf(error, 512, "%s", what);
        return RunStatus::failed;
    }
    int64_t m_max = 0;
    for (int64_t i : route.active) m_max = route.n_rows(i) > m_max ? route.n_rows(i) : m_max;
    const Plan plan = decide(layer, route, m_max, options.n_threads);
    const bool gives_way = layer.ids.n_tokens > uninterrupted_tokens;
    Run run{layer, plan, options, work, cut(work.scratch, layer, plan, route.pairs.size(), m_max), m_max, {}, Turn(gives_way)};
    gather(layer, token0, n_tokens, run.scratch, work);
    work.up_tiles.cut(layer.up.weights.parts(), layer.up.row0, layer.n_ff(), plan.up_rows, int64_t(route.active.size()));
    work.down_tiles.cut(layer.down.weights.parts(), layer.down.row0, layer.n_embd(), plan.down_rows, 1);
    work.tile_y.resize(size_t(m_max * plan.n_threads));
    if (work.n_up_done < route.active.size()) {
        work.n_up_done = route.active.size();
        work.up_done.reset(new std::atomic<int32_t>[work.n_up_done]);
    }
    for (size_t i = 0; i < route.active.size(); i++) work.up_done[i].store(0, std::memory_order_relaxed);
    for (; !is_done(run); run.turn = Turn(gives_way)) run_team(plan.n_threads, compute_tiles, &run);
    if (run.aborted.load()) return RunStatus::aborted;
    if (has_gate(layer.activation.kind)) count_matmul(layer.gate.weights, layer.gate.n_rows, route);
    count_matmul(layer.up.weights, layer.up.n_rows, route);
    count_matmul(layer.down.weights, layer.down.n_rows, route);
    return RunStatus::ok;
}


Input x_of(MoeLayer & layer) {
    return {&layer.x, &layer.x_token_stride, &layer.x_slot_stride, layer.n_x_slots, layer.up.weights.shape.k * 4};
}

Input ids_of(MoeLayer & layer) { return {&layer.ids.data, &layer.ids.token_stride, &layer.ids.slot_stride, layer.ids.n_used, 4}; }

Input weights_of(MoeLayer & layer) {
    return {&layer.weights, &layer.weights_token_stride, &layer.weights_slot_stride, layer.ids.n_used, 4};
}

void restore(const Input & to, const Input & from, int64_t n_tokens) {
    if (*to.data == *from.data) return;  // it was not copied
    for (int64_t t = 0; t < n_tokens; t++) {
        for (int64_t s = 0; s < to.n_slots; s++) {
            memcpy(const_cast<uint8_t *>(*to.data) + t * *to.token_stride + s * *to.slot_stride,
                   *from.data + t * *from.token_stride + s * *from.slot_stride, size_t(to.n_bytes));
        }
    }
}

}  // namespace

void protect_inputs(MoeLayer & layer, Workspace & work) {
    protect(layer, x_of(layer), work.x_copy);
    protect(layer, ids_of(layer), work.ids_copy);
    protect(layer, weights_of(layer), work.weights_copy);
}

void unprotect_inputs(const MoeLayer & original, const MoeLayer & with_copies) {
    MoeLayer to = original;
    MoeLayer from = with_copies;
    restore(x_of(to), x_of(from), to.ids.n_tokens);
    restore(ids_of(to), ids_of(from), to.ids.n_tokens);
    restore(weights_of(to), weights_of(from), to.ids.n_tokens);
}

RunStatus run_moe_layer(const MoeLayer & given, const RunOptions & options, Workspace & work, char * error, const std::vector<char> * only) {
    MoeLayer layer = given;
    protect_inputs(layer, work);
    for (int64_t t0 = 0; t0 < layer.ids.n_tokens; t0 += token_tile) {
        const int64_t n = layer.ids.n_tokens - t0 < token_tile ? layer.ids.n_tokens - t0 : token_tile;
        const RunStatus status = run_token_tile(layer, t0, n, options, work, error, only);
        if (status != RunStatus::ok) return status;
    }
    if (!only) count_layer();
    return RunStatus::ok;
}

}  // namespace hybrid_moe
