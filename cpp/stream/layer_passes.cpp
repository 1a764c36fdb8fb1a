// Streams: one layer's passes over the devices and the CPU. Decisions are in decide.cpp.
#include "stream/streams.h"
#include "stream/streams_pass.h"
#include "stream/trace.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace hybrid_moe {
namespace {

MoeLayer tokens_of(const MoeLayer & layer, int64_t token0, int64_t n_tokens) {
    MoeLayer part = layer;
    part.ids.data += token0 * layer.ids.token_stride;
    part.ids.n_tokens = n_tokens;
    part.x += token0 * layer.x_token_stride;
    if (layer.weights) part.weights += token0 * layer.weights_token_stride;
    part.y += token0 * layer.y_token_stride;
    return part;
}

bool overlaps(const uint8_t * a, int64_t n_a, const uint8_t * b, int64_t n_b) { return a < b + n_b && b < a + n_a; }

// The same input for a layer whose y lies where it would come to the host: it comes to the workspace instead.
DeviceInput beside_y(const DeviceInput & x, MoeLayer & layer, Workspace & work) {
    work.x_copy.resize(size_t(layer.ids.n_tokens * layer.x_token_stride));
    layer.x = work.x_copy.data();
    return {x.gpu, x.tensor, [tensor = x.tensor, &bytes = work.x_copy] {
        host().ggml_backend_tensor_get(tensor, bytes.data(), 0, bytes.size());
    }};
}

bool is_finite_input(const MoeLayer & l) {
    for (int64_t t = 0; t < l.ids.n_tokens; t++) {
        const float * row = reinterpret_cast<const float *>(l.x + t * l.x_token_stride);
        for (int64_t i = 0; i < l.up.weights.shape.k; i++) {
            if (!std::isfinite(row[i])) return false;
        }
    }
    return true;
}

}  // namespace

// False, with none of them: others stream there, and this thread does not wait.
bool Streams::lease(const std::vector<size_t> & devices, std::vector<std::unique_lock<std::mutex>> & leases) {
    for (const size_t i : devices) {
        leases.emplace_back(devices_[i]->lease(), std::defer_lock);
        if (!this_thread_is_first()) leases.back().lock();
        else if (!leases.back().try_lock()) break;
    }
    if (leases.size() == devices.size() && (leases.empty() || leases.back())) return true;
    leases.clear();
    return false;
}

std::vector<size_t> Streams::ready_devices(const Pass & pass, const DeviceIndex & index) {
    std::vector<size_t> ready;
    const int64_t tile = std::min<int64_t>(device_tile_rows, int64_t(align_up(size_t(index.max_rows), size_t(index_alignment))));
    const BatchShape shape = shape_of(pass.layer, pass.layer.ids.n_tokens, tile, int64_t(index.x_row.size()));
    for (const size_t i : pass.devices) {
        DeviceStream & d = *devices_[i];
        try {
            d.make_room(pass.layer, *pass.experts, shape, pass.x && pass.x->gpu == &d.gpu() ? pass.x->tensor : nullptr);
            ready.push_back(i);
        } catch (const std::exception & e) {
            note("room " + d.gpu().name, std::string(e.what()) + "; experts are not streamed to it");
        }
    }
    return ready;
}

// The n busiest of the next layer, as many as devices take of this one.
void Streams::look_ahead(const std::vector<size_t> & devices, const LayerExperts & experts, size_t n_experts) {
    const auto next = ahead_.next(experts, guess_);
    if (!next || !next->may_be_read_ahead()) return;
    const std::vector<DeviceRate> rates = rates_of(devices);
    std::vector<std::vector<int64_t>> shares(devices.size());
    std::vector<int64_t> likely = ahead_.likely(*next);
    if (likely.size() > n_experts) likely.erase(likely.begin() + std::ptrdiff_t(n_experts), likely.end());
    for (const int64_t expert : likely) {
        // To whoever would have it first, each link at its own rate.
        size_t best = 0;
        for (size_t d = 1; d < shares.size(); d++) {
            const auto ends = [&](size_t i) { return double(shares[i].size() + 1) * rates[i].copy_s_per_byte; };
            if (ends(d) < ends(best)) best = d;
        }
        shares[best].push_back(expert);
    }
    for (size_t d = 0; d < devices.size(); d++) devices_[devices[d]]->look_ahead(next, shares[d]);
}

// The job of some devices, which do not touch it any more at the end, whatever happens.
struct Streams::Running {
    LayerJob &                   job;
    std::vector<DeviceStream *>  left;

    bool finish_one(std::chrono::milliseconds patience) {
        if (!left.back()->finish(patience)) return false;
        left.pop_back();
        return true;
    }
    ~Running() {
        if (!left.empty()) job.cancel(-1, "given up");
        while (!left.empty()) finish_one(std::chrono::milliseconds(100));
    }
};

// The idlest experts are the CPU's, except those that are on a device already. Returns the others, marks the CPU's.
std::vector<QueuedExpert> Streams::divide(const Pass & pass, const StreamPlan & plan, const std::vector<size_t> & devices,
                                          std::vector<char> & for_cpu) const {
    std::vector<char> is_there(for_cpu.size(), 0);
    for (const size_t i : devices) {
        for (const int64_t e : devices_[i]->there(*pass.experts)) is_there[size_t(e)] = 1;
    }
    size_t n_left = plan.n_cpu_experts;
    std::vector<QueuedExpert> for_devices;
    for (auto e = plan.by_rows.rbegin(); e != plan.by_rows.rend(); ++e) {
        const bool is_cpus = n_left > 0 && !is_there[size_t(e->expert)];
        if (is_cpus) for_cpu[size_t(e->expert)] = 1;
        else for_devices.push_back(*e);
        n_left -= is_cpus;
    }
    return for_devices;
}

bool Streams::stream(const Pass & pass, const StreamPlan & plan, const std::vector<size_t> & devices, RunStatus & status, char * error) {
    std::vector<char> for_cpu(size_t(pass.experts->n_expert()), 0);
    const std::vector<QueuedExpert> for_devices = divide(pass, plan, devices, for_cpu);
    const bool cpu_adds = for_devices.size() < plan.by_rows.size();
    const size_t n_for_devices = for_devices.size();
    LayerJob job(pass.layer, pass.route, pass.experts, for_devices, rates_of(devices), cpu_adds);
    Running running{job, {}};
    for (size_t w = 0; w < devices.size(); w++) {
        running.left.push_back(devices_[devices[w]].get());
        devices_[devices[w]]->start(job, int(w));
    }
    look_ahead(devices, *pass.experts, n_for_devices);
    status = RunStatus::ok;
    if (cpu_adds) {
        const int64_t begin = now_ns();
        RunOptions options = pass.options;
        options.n_threads = helping_threads(options.n_threads, devices.size());
        status = run_moe_layer(pass.layer, options, pass.work, error, &for_cpu);
        trace_span("CPU", "experts", "share", begin, now_ns(), pass.experts->name(), -1, int64_t(plan.n_cpu_experts), 0);
        if (status == RunStatus::ok) job.sums.cpu_is_done();
        else job.cancel(-1, status == RunStatus::aborted ? "aborted" : error);
    }
    while (!running.left.empty()) {
        if (running.finish_one(std::chrono::milliseconds(5)) || status != RunStatus::ok || !must_abort(pass.options, 0)) continue;
        status = RunStatus::aborted;
        job.cancel(-1, "aborted");
    }
    if (status != RunStatus::ok) return true;
    if (!job.is_cancelled()) {
        for (const size_t i : devices) n_failures_[i] = 0;
        n_streamed_++;
        n_cpu_experts_ += plan.by_rows.size() - n_for_devices;
        return true;
    }
    if (job.is_damaged) {
        snprintf(error, 512, "%s", job.reason.c_str());
        status = RunStatus::failed;
        return true;
    }
    count_failure(devices[size_t(job.failed_worker)], job);
    return false;
}

RunStatus Streams::run_pass(Pass & pass, char * error) {
    Pair bad;
    if (!group_by_expert(pass.layer.ids, pass.experts->n_expert(), pass.route, bad)) {
        describe_bad_id(pass.layer.down.weights, pass.layer.ids, bad, error);
        return RunStatus::failed;
    }
    std::vector<std::unique_lock<std::mutex>> leases;
    const uint64_t n_failed_before = n_failed_jobs_;
    const auto on_cpu = [&] {
        leases.clear();  // others may stream meanwhile
        if (pass.x) pass.x->to_host();
        // The copy that failed may have been the one that brought the input.
        if (pass.x && n_failed_jobs_ != n_failed_before && !is_finite_input(pass.layer)) {
            snprintf(error, 512, "%s: the device failed, and the input of %s that it held is damaged; load the model without it (devices)",
                     pass.x->gpu->name.c_str(), pass.experts->name().c_str());
            return RunStatus::failed;
        }
        n_on_cpu_++;
        if (!pass.layer.has_kernels()) return RunStatus::not_here;
        return run_moe_layer(pass.layer, pass.options, pass.work, error);
    };
    pass.devices      = devices_in_use();
    pass.cpu_may_help = options_.cpu_helps && (this_thread_is_first() || permit().has_cpu());
    if (pass.devices.empty() || (options_.slp == Slp::automatic && pass.layer.ids.n_tokens < min_automatic_tokens)) return on_cpu();
    if (!lease(pass.devices, leases)) return on_cpu();
    // Decided before any device memory is taken: most batches are short.
    Rates rates = rates_for(pass);
    if (pass.devices.empty()) return on_cpu();
    StreamPlan plan = decide(pass, rates);
    if (plan.streams) {
        const DeviceIndex index = make_index(pass.layer, pass.route);
        const std::vector<size_t> ready = index.has_twice ? std::vector<size_t>() : ready_devices(pass, index);
        if (ready.size() < pass.devices.size()) {
            pass.devices = ready;
            if (ready.empty()) return on_cpu();
            rates.devices = rates_of(ready);
            plan = decide(pass, rates);
        }
    }
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        last_plan_  = plan.print();
        last_rates_ = rates.print();
    }
    if (!plan.streams) {
        const int64_t begin = now_ns();
        const RunStatus status = on_cpu();
        if (status == RunStatus::ok) correct_cpu(pass, rates, plan.cpu_s, double(now_ns() - begin) * 1e-9);
        return status;
    }
    const std::vector<size_t> & devices = pass.devices;
    const bool is_elsewhere = pass.x && (devices.size() > 1 || &devices_[devices[0]]->gpu() != pass.x->gpu);
    if (pass.x && (is_elsewhere || plan.n_cpu_experts)) pass.x->to_host();
    RunStatus status;
    return stream(pass, plan, devices, status, error) ? status : on_cpu();
}

RunStatus Streams::run(const MoeLayer & given, const RunOptions & options, Workspace & work, StreamContext & context, const DeviceInput * x,
                       char * error) {
    MoeLayer layer = given;
    DeviceInput elsewhere;
    if (x && overlaps(layer.x, layer.ids.n_tokens * layer.x_token_stride, layer.y, layer.ids.n_tokens * layer.y_token_stride)) {
        elsewhere = beside_y(*x, layer, work);
        x = &elsewhere;
    }
    protect_inputs(layer, work);
    const auto experts = ahead_.known(experts_of(layer));
    std::vector<int64_t> rows(size_t(experts->n_expert()), 0);
    const bool is_short = options_.slp == Slp::automatic && layer.ids.n_tokens < min_automatic_tokens;  // the CPU's: no device is asked
    const int64_t per_pass = is_short ? layer.ids.n_tokens : tokens_per_pass(layer, *experts);
    const bool in_one = per_pass >= layer.ids.n_tokens;
    if (!in_one && x) x->to_host();
    for (int64_t t0 = 0; t0 < layer.ids.n_tokens; t0 += per_pass) {
        const MoeLayer part = tokens_of(layer, t0, std::min(per_pass, layer.ids.n_tokens - t0));
        Pass pass{part, experts, options, work, context.route, in_one ? x : nullptr, {}, true};
        const RunStatus status = run_pass(pass, error);
        if (status == RunStatus::not_here) unprotect_inputs(given, layer);
        if (status != RunStatus::ok) return status;
        for (size_t e = 0; e < rows.size(); e++) rows[e] += context.route.n_rows(int64_t(e));
    }
    ahead_.note(context.previous.get(), experts, rows);
    context.previous = experts;
    return RunStatus::ok;
}

}  // namespace hybrid_moe
