// group_by_expert -> decide -> run for one expert projection.
#include "moe/expert_matmul.h"

#include "threads/team.h"

#include <atomic>
#include <cstdio>
#include <cstring>

namespace hybrid_moe {
namespace {

std::atomic<uint64_t> total_matmuls, total_rows, total_bytes, total_dot, total_gemm;

int32_t id_at(const ExpertMatmul & op, int64_t token, int64_t slot) {
    int32_t id;
    memcpy(&id, op.ids + token * op.ids_token_stride + slot * op.ids_slot_stride, sizeof id);
    return id;
}

// Counting sort of the (token, slot) pairs by expert, tokens in order. False when an id is out of range.
bool group_by_expert(const ExpertMatmul & op, Routing & r, char * error) {
    const int64_t n_expert = op.experts.shape.n_expert;
    r.begin.assign(size_t(n_expert) + 1, 0);
    r.active.clear();
    for (int64_t t = 0; t < op.n_tokens; t++) {
        for (int64_t s = 0; s < op.n_used; s++) {
            const int32_t id = id_at(op, t, s);
            if (id < 0 || id >= n_expert) {
                snprintf(error, 512, "tensor %s: token %lld asks for expert %d of %lld", op.experts.name,
                         static_cast<long long>(t), id, static_cast<long long>(n_expert));
                return false;
            }
            r.begin[size_t(id) + 1]++;
        }
    }
    for (int64_t i = 0; i < n_expert; i++) {
        if (r.begin[size_t(i) + 1] > 0) r.active.push_back(i);
        r.begin[size_t(i) + 1] += r.begin[size_t(i)];
    }
    const size_t n = size_t(op.n_tokens * op.n_used);
    r.x.resize(n);
    r.y.resize(n);
    for (int64_t t = op.n_tokens - 1; t >= 0; t--) {  // backwards: begin[i + 1] runs down to where expert i starts
        for (int64_t s = op.n_used - 1; s >= 0; s--) {
            const size_t at = size_t(--r.begin[size_t(id_at(op, t, s)) + 1]);
            r.x[at] = reinterpret_cast<const float *>(op.x + t * op.x_token_stride + s % op.n_x_slots * op.x_slot_stride);
            r.y[at] = reinterpret_cast<float *>(op.y + t * op.y_token_stride + s * op.y_slot_stride);
        }
    }
    // begin[i + 1] now holds expert i's start: shift back.
    for (int64_t i = 0; i < n_expert; i++) r.begin[size_t(i)] = r.begin[size_t(i) + 1];
    r.begin[size_t(n_expert)] = int64_t(n);
    return true;
}

Plan decide(const ExpertMatmul & op, const Routing & route, int n_threads) {
    Plan plan;
    const int64_t n_rows = op.experts.shape.n_rows;
    // At least eight tiles per thread, so that the last one to finish is short; multiples of the panel height.
    const int64_t wanted = 8 * int64_t(n_threads);
    const int64_t n_active = int64_t(route.active.size());
    const int64_t per_expert = n_active ? (wanted + n_active - 1) / n_active : 1;
    int64_t rows = (n_rows + per_expert - 1) / per_expert;
    rows = (rows + panel_rows - 1) / panel_rows * panel_rows;
    plan.tile_rows = rows < 1 ? 1 : rows;
    plan.n_tiles_per_expert = (n_rows + plan.tile_rows - 1) / plan.tile_rows;
    const int64_t n_tiles = plan.n_tiles_per_expert * n_active;
    plan.n_threads = n_tiles < n_threads ? (n_tiles > 0 ? int(n_tiles) : 1) : n_threads;
    return plan;
}

// Shared by the threads of one run.
struct Run {
    const ExpertMatmul & op;
    const Routing &      route;
    const Plan &         plan;
    const RunOptions &   options;
    uint8_t *            panels;
    std::atomic<int64_t>      next{0};
    std::atomic<bool>         aborted{false};
    std::atomic<const char *> error{nullptr};

    bool stopped() const {
        return aborted.load(std::memory_order_relaxed) || error.load(std::memory_order_relaxed);
    }
};

float * panel_of(uint8_t * panels, int i_thread) {
    const uintptr_t aligned = (uintptr_t(panels) + 63) & ~uintptr_t(63);
    return reinterpret_cast<float *>(aligned + size_t(i_thread) * panel_bytes);
}

void check_new_experts(void * context, int, int) {
    Run & run = *static_cast<Run *>(context);
    for (;;) {
        const int64_t i = run.next.fetch_add(1, std::memory_order_relaxed);
        if (i >= int64_t(run.route.active.size()) || run.stopped()) return;
        const int64_t i_expert = run.route.active[size_t(i)];
        if (run.op.experts.is_ready(i_expert)) continue;
        if (const char * what = run.op.experts.scattered->make_ready(i_expert, *run.options.kernels)) run.error.store(what);
    }
}

void compute_tiles(void * context, int i_thread, int) {
    Run & run = *static_cast<Run *>(context);
    const int64_t n_tiles = run.plan.n_tiles_per_expert * int64_t(run.route.active.size());
    const int64_t n_rows = run.op.experts.shape.n_rows;
    for (;;) {
        const int64_t tile = run.next.fetch_add(1, std::memory_order_relaxed);
        if (tile >= n_tiles || run.stopped()) return;
        const int64_t in_expert = tile % run.plan.n_tiles_per_expert;
        if (in_expert == 0 && run.options.abort && run.options.abort(run.options.abort_data)) {
            run.aborted.store(true);
            return;
        }
        const int64_t i_expert = run.route.active[size_t(tile / run.plan.n_tiles_per_expert)];
        const int64_t begin = run.route.begin[size_t(i_expert)];
        const TokenRows rows = {run.route.x.data() + begin, run.route.y.data() + begin,
                                run.route.begin[size_t(i_expert) + 1] - begin};
        const int64_t row0 = in_expert * run.plan.tile_rows;
        const int64_t row1 = row0 + run.plan.tile_rows < n_rows ? row0 + run.plan.tile_rows : n_rows;
        const ExpertMatrix matrix = run.op.experts.matrix(i_expert);
        if (rows.m >= gemm_min_rows) {
            run.options.kernels->gemm(matrix, row0, row1, rows, panel_of(run.panels, i_thread));
        } else {
            run.options.kernels->dot(matrix, row0, row1, rows);
        }
    }
}

bool all_ready(const ExpertWeights & experts, const Routing & route) {
    for (int64_t i : route.active) {
        if (!experts.is_ready(i)) return false;
    }
    return true;
}

void count(const ExpertMatmul & op, const Routing & route) {
    uint64_t n_gemm = 0;
    for (int64_t i : route.active) {
        n_gemm += route.begin[size_t(i) + 1] - route.begin[size_t(i)] >= gemm_min_rows;
    }
    const ExpertTensor::Shape & s = op.experts.shape;
    total_matmuls.fetch_add(1, std::memory_order_relaxed);
    total_rows.fetch_add(uint64_t(op.n_tokens * op.n_used), std::memory_order_relaxed);
    total_bytes.fetch_add(uint64_t(s.n_rows) * s.row_bytes * route.active.size(), std::memory_order_relaxed);
    total_gemm.fetch_add(n_gemm, std::memory_order_relaxed);
    total_dot.fetch_add(route.active.size() - n_gemm, std::memory_order_relaxed);
}

}  // namespace

RunStatus run_expert_matmul(const ExpertMatmul & op, const RunOptions & options, Workspace & work, char * error) {
    if (!group_by_expert(op, work.routing, error)) return RunStatus::failed;
    const Plan plan = decide(op, work.routing, options.n_threads);
    const size_t panels = panel_bytes * size_t(options.n_threads) + 64;
    if (work.panels.size() < panels) work.panels.resize(panels);
    Run run{op, work.routing, plan, options, work.panels.data()};
    if (!all_ready(op.experts, work.routing)) {
        run_team(plan.n_threads, check_new_experts, &run);
        run.next.store(0);
    }
    if (!run.stopped()) run_team(plan.n_threads, compute_tiles, &run);
    if (const char * what = run.error.load()) {
        snprintf(error, 512, "%s", what);
        return RunStatus::failed;
    }
    if (run.aborted.load()) return RunStatus::aborted;
    count(op, work.routing);
    return RunStatus::ok;
}

Counters counters() {
    return {total_matmuls.load(), total_rows.load(), total_bytes.load(), total_dot.load(), total_gemm.load()};
}

}  // namespace hybrid_moe
