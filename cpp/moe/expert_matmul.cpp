// group_by_expert -> decide -> run for one expert projection.
#include "moe/expert_matmul.h"

#include "threads/team.h"

#include <atomic>
#include <cstdio>
#include <exception>

namespace hybrid_moe {
namespace {

std::atomic<uint64_t> total_layers, total_matmuls, total_rows, total_bytes, total_dot, total_gemm;

// How the product is cut: tiles of consecutive output rows of one expert, taken by the threads as they come free.
struct Plan {
    int     n_threads = 1;
    int64_t tile_rows = 0;
    int64_t n_tiles_per_expert = 0;
};

Plan decide(const ExpertMatmul & op, const Routing & route, int n_threads) {
    Plan plan;
    const int64_t n_rows = op.experts.shape.n_rows;
    // At least eight tiles per thread, so that the last one to finish is short; multiples of what gemm takes at once.
    const int64_t wanted = 8 * int64_t(n_threads);
    const int64_t n_active = int64_t(route.active.size());
    const int64_t per_expert = n_active ? (wanted + n_active - 1) / n_active : 1;
    int64_t rows = (n_rows + per_expert - 1) / per_expert;
    rows = (rows + gemm_panel_rows - 1) / gemm_panel_rows * gemm_panel_rows;
    plan.tile_rows = rows < 1 ? 1 : rows;
    plan.n_tiles_per_expert = (n_rows + plan.tile_rows - 1) / plan.tile_rows;
    const int64_t n_tiles = plan.n_tiles_per_expert * n_active;
    plan.n_threads = n_tiles < n_threads ? (n_tiles > 0 ? int(n_tiles) : 1) : n_threads;
    return plan;
}

// Shared by the threads of one run.
struct Run {
    const ExpertMatmul & op;
    const Plan &         plan;
    const RunOptions &   options;
    Workspace &          work;
    std::atomic<int64_t> next{0};
    std::atomic<bool>    aborted{false};
    Turn                 turn;
};

float * gemm_scratch_of(std::vector<uint8_t> & scratch, int i_thread) {
    const uintptr_t aligned = (uintptr_t(scratch.data()) + 63) & ~uintptr_t(63);
    return reinterpret_cast<float *>(aligned + size_t(i_thread) * gemm_scratch_bytes);
}

int64_t n_tiles_of(const Run & run) { return run.plan.n_tiles_per_expert * int64_t(run.work.routing.active.size()); }

bool is_done(const Run & run) { return run.aborted.load() || run.next.load() >= n_tiles_of(run); }

void compute_tiles(void * context, int i_thread, int) {
    Run & run = *static_cast<Run *>(context);
    const Routing & route = run.work.routing;
    const int64_t n_tiles = n_tiles_of(run);
    const int64_t n_rows = run.op.experts.shape.n_rows;
    for (;;) {
        if (run.turn.is_over()) return;
        if (must_abort(run.options, i_thread)) {
            run.aborted.store(true);
            return;
        }
        const int64_t tile = run.next.fetch_add(1, std::memory_order_relaxed);
        if (tile >= n_tiles || run.aborted.load(std::memory_order_relaxed)) return;
        const int64_t in_expert = tile % run.plan.n_tiles_per_expert;
        const int64_t i_expert = route.active[size_t(tile / run.plan.n_tiles_per_expert)];
        const int64_t begin = route.begin[size_t(i_expert)];
        const TokenRows rows = {run.work.x.data() + begin, run.work.y.data() + begin, route.n_rows(i_expert)};
        const int64_t row0 = in_expert * run.plan.tile_rows;
        const int64_t row1 = row0 + run.plan.tile_rows < n_rows ? row0 + run.plan.tile_rows : n_rows;
        multiply(*run.options.kernels, run.op.experts, i_expert, row0, row1, rows, gemm_scratch_of(run.work.scratch, i_thread));
    }
}

struct FirstUse {
    const ExpertWeights & w;
    const Routing &       route;
    const Kernels &       kernels;
    std::atomic<int64_t>      next{0};
    std::atomic<const char *> error{nullptr};
};

void check_new_experts(void * context, int, int) {
    FirstUse & use = *static_cast<FirstUse *>(context);
    for (;;) {
        const int64_t i = use.next.fetch_add(1, std::memory_order_relaxed);
        if (i >= int64_t(use.route.active.size()) || use.error.load(std::memory_order_relaxed)) return;
        const int64_t i_expert = use.route.active[size_t(i)];
        if (use.w.is_ready(i_expert)) continue;
        try {  // an exception would end the host: nobody above a thread's first function can catch it
            if (const char * what = use.w.scattered->make_ready(i_expert, use.kernels)) use.error.store(what);
        } catch (const std::exception &) {
            use.error.store("not enough memory to look for the scales of its FP8 experts");
        }
    }
}

}  // namespace

const char * make_experts_ready(const ExpertWeights & w, const Routing & route, const RunOptions & options) {
    bool all = true;
    for (int64_t i : route.active) all = all && w.is_ready(i);
    if (all) return nullptr;
    FirstUse use{w, route, *options.kernels};
    run_team(options.n_threads, check_new_experts, &use);
    return use.error.load();
}

void multiply(const Kernels & kernels, const ExpertWeights & w, int64_t i_expert, int64_t row0, int64_t row1,
              const TokenRows & rows, float * scratch) {
    for (int64_t end; row0 < row1; row0 = end) {
        const ExpertMatrix e = w.matrix(i_expert, row0, end);
        end = end < row1 ? end : row1;
        if (rows.m >= gemm_min_rows(e.type)) {
            kernels.gemm(e, row0, end, rows, scratch);
        } else {
            kernels.dot(e, row0, end, rows);
        }
    }
}

void describe_bad_id(const ExpertWeights & w, const ExpertIds & ids, Pair bad, char * error) {
    snprintf(error, 512, "tensor %s: token %d asks for expert %d of %lld", w.name, bad.token, ids.at(bad.token, bad.slot),
             static_cast<long long>(w.shape.n_expert));
}

RunStatus run_expert_matmul(const ExpertMatmul & op, const RunOptions & options, Workspace & work, char * error) {
    Routing & route = work.routing;
    Pair bad;
    if (!group_by_expert(op.ids, op.experts.shape.n_expert, route, bad)) {
        describe_bad_id(op.experts, op.ids, bad, error);
        return RunStatus::failed;
    }
    work.x.resize(route.pairs.size());
    work.y.resize(route.pairs.size());
    for (size_t i = 0; i < route.pairs.size(); i++) {
        const Pair p = route.pairs[i];
        work.x[i] = reinterpret_cast<const float *>(op.x + p.token * op.x_token_stride + p.slot % op.n_x_slots * op.x_slot_stride);
        work.y[i] = reinterpret_cast<float *>(op.y + p.token * op.y_token_stride + p.slot * op.y_slot_stride);
    }
    if (const char * what = make_experts_ready(op.experts, route, options)) {
        snprintf(error, 512, "%s", what);
        return RunStatus::failed;
    }
    const Plan plan = decide(op, route, options.n_threads);
    const size_t needed = gemm_scratch_bytes * size_t(options.n_threads) + 64;
    if (work.scratch.size() < needed) work.scratch.resize(needed);
    const bool gives_way = op.ids.n_tokens > uninterrupted_tokens;
    Run run{op, plan, options, work, {}, {}, Turn(gives_way)};
    for (; !is_done(run); run.turn = Turn(gives_way)) run_team(plan.n_threads, compute_tiles, &run);
    if (run.aborted.load()) return RunStatus::aborted;
    count_matmul(op.experts, op.experts.shape.n_rows, route);
    return RunStatus::ok;
}

void count_layer() { total_layers.fetch_add(1, std::memory_order_relaxed); }

void count_matmul(const ExpertWeights & w, int64_t n_rows, const Routing & route) {
    uint64_t n_gemm = 0;
    for (int64_t i : route.active) n_gemm += route.n_rows(i) >= gemm_min_rows(w.shape.type);
    total_matmuls.fetch_add(1, std::memory_order_relaxed);
    total_rows.fetch_add(route.pairs.size(), std::memory_order_relaxed);
    total_bytes.fetch_add(uint64_t(n_rows) * w.shape.row_bytes * route.active.size(), std::memory_order_relaxed);
    total_gemm.fetch_add(n_gemm, std::memory_order_relaxed);
    total_dot.fetch_add(route.active.size() - n_gemm, std::memory_order_relaxed);
}

Counters counters() {
    return {total_layers.load(), total_matmuls.load(), total_rows.load(), total_bytes.load(), total_dot.load(), total_gemm.load()};
}

}  // namespace hybrid_moe
