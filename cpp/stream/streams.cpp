// Streams: opening devices, one layer's passes, failures. Decisions are in decide.cpp.
#include "stream/streams.h"

#include "stream/streams_pass.h"
#include "stream/trace.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace hybrid_moe {
namespace {

// Batches below are the CPU's without asking: nothing that streams whole experts can win.
constexpr int64_t min_tokens = 32;

// After so many failed layers in a row a device is left alone.
constexpr int max_failures = 3;

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

// Halves n until the device can gather rows of n_columns out of n: some limit what a kernel may address in one tensor.
int64_t largest_batch(const Gpu & gpu, int64_t n_columns, int64_t n) {
    for (; n > min_tokens; n = std::max(min_tokens, (n + 1) / 2)) {
        const TensorContext context(4);
        ggml_tensor * x    = host().ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, n_columns, n);
        ggml_tensor * rows = host().ggml_new_tensor_1d(context.get(), GGML_TYPE_I32, index_alignment);
        if (gpu.supports(host().ggml_get_rows(context.get(), x, rows))) break;
    }
    return n;
}

}  // namespace

Streams & Streams::get() {
    static Streams * streams = new Streams;  // its threads may run until the process ends
    return *streams;
}

void Streams::choose(const StreamOptions & options) { options_ = options; }

void Streams::note(const std::string & kind, const std::string & sentence) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const auto & [known, text] : troubles_) {
            if (known == kind) return;
        }
        troubles_.emplace_back(kind, sentence);
    }
    host().log(GGML_LOG_LEVEL_WARN, "hybrid-moe: %s\n", sentence.c_str());
}

bool Streams::is_open_by_other_name(const Gpu & gpu) const {
    return !gpu.id.empty() && std::any_of(devices_.begin(), devices_.end(), [&](const auto & d) {
        return d->gpu().id == gpu.id && d->gpu().family != gpu.family;
    });
}

void Streams::open() {
    is_open_ = true;
    pid_     = getpid();
    std::vector<std::string> wanted = options_.devices;
    std::string all;
    for (const Gpu & gpu : find_gpus()) {
        all += (all.empty() ? "" : ", ") + gpu.name;
        const auto named = std::find(wanted.begin(), wanted.end(), gpu.name);
        if (!options_.all_devices && named == wanted.end()) continue;
        if (options_.all_devices && is_open_by_other_name(gpu)) continue;  // CUDA0 and Vulkan0 may be one GPU
        std::erase(wanted, gpu.name);  // however often it is named
        try {
            devices_.push_back(std::make_unique<DeviceStream>(gpu, options_.device));
            devices_.back()->set_number(devices_.size() - 1);
        } catch (const std::exception & e) {
            troubles_.emplace_back("open " + gpu.name, std::string(e.what()) + "; experts are not streamed to it");
        }
    }
    for (const std::string & name : wanted) {
        troubles_.emplace_back("unknown " + name, "HYBRID_MOE_DEVICES: there is no GPU device '" + name + "'; " +
                               (all.empty() ? "this host has none" : "there are: " + all));
    }
    const char * missing = missing_for_streaming();
    if (missing) troubles_.emplace_back("host", std::string("this host's ggml has no ") + missing + ", so experts are not streamed");
    // Registered after the back ends' own handlers, so it runs before them.
    if (!devices_.empty()) atexit([] { Streams::get().quiesce(); });
    n_failures_.reset(new std::atomic<int>[devices_.size()]());
    for (const auto & [kind, sentence] : troubles_) host().log(GGML_LOG_LEVEL_WARN, "hybrid-moe: %s\n", sentence.c_str());
}

bool Streams::may_stream(int64_t n_tokens) {
    if (options_.slp == Slp::off || n_tokens < min_tokens) return false;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!is_open_) open();
    return !devices_.empty();
}

bool Streams::takes_type(ggml_type type) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = takes_.find(type);
    if (known != takes_.end()) return known->second;
    const TensorContext context(4);
    constexpr int64_t k = 2048;  // whole groups of every type
    ggml_tensor * w = host().ggml_new_tensor_2d(context.get(), type, k, 64);
    ggml_tensor * x = host().ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, k, 64);
    const ggml_tensor * y = host().ggml_mul_mat(context.get(), w, x);
    bool takes = false;
    for (const auto & d : devices_) takes = takes || d->gpu().supports(y);
    takes_[type] = takes;
    return takes;
}

std::vector<Gpu> Streams::gpus() {
    std::vector<Gpu> all;
    if (!may_stream(min_tokens)) return all;
    for (const auto & d : devices_) all.push_back(d->gpu());
    return all;
}

const Gpu * Streams::gpu_of(ggml_backend_dev_t device) const {
    for (const auto & d : devices_) {
        if (d->gpu().device == device) return &d->gpu();
    }
    return nullptr;
}

std::vector<DeviceRate> Streams::rates_of(const std::vector<size_t> & devices) const {
    std::vector<DeviceRate> rates;
    for (const size_t i : devices) rates.push_back(devices_[i]->rate());
    return rates;
}

std::vector<size_t> Streams::devices_in_use() const {
    std::vector<size_t> all;
    for (size_t i = 0; i < devices_.size(); i++) {
        if (n_failures_[i] < max_failures && (this_thread_is_first() || permit().has_device(i))) all.push_back(i);
    }
    return all;
}

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

int64_t Streams::tokens_per_pass(const MoeLayer & layer, const LayerExperts & experts) {
    int64_t n = layer.ids.n_tokens;
    for (const size_t i : devices_in_use()) {
        const auto & d = devices_[i];
        const size_t slots = d->least_bytes(experts);
        const size_t may   = d->budget();
        if (may <= slots) continue;  // it will not take part
        // Every expert's indices are padded.
        const BatchShape one  = shape_of(layer, 1, device_tile_rows, index_alignment * experts.n_expert());
        const size_t fixed    = BatchTensors(one, false).n_bytes(d->gpu());
        const size_t per_token = size_t(layer.n_x_slots * layer.up.weights.shape.k + layer.n_embd()) * 4 + size_t(layer.ids.n_used) * 12;
        const size_t for_batch = may - slots;
        if (for_batch <= fixed) continue;
        n = std::min(n, std::max<int64_t>(min_tokens, int64_t((for_batch - fixed) / per_token)));
        const int64_t widest = std::max(layer.n_x_slots * layer.up.weights.shape.k, layer.n_embd());
        n = largest_batch(d->gpu(), widest, n);
    }
    return n;
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

void Streams::count_failure(size_t i_device, const LayerJob & job) {
    const std::string & name = devices_[i_device]->gpu().name;
    note("failure " + name, job.reason + " while it ran experts of " + job.experts->name() + "; the CPU computes the layer instead");
    n_failed_jobs_++;
    if (++n_failures_[i_device] == max_failures) {
        note("given up " + name, name + " failed several times in a row: experts are not streamed to it any more");
    }
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

void Streams::give_back(const Gpu & gpu, std::unique_ptr<GpuMemory> memory) {
    for (const auto & d : devices_) {
        if (&d->gpu() == &gpu) d->give_back(std::move(memory));
    }
}

bool Streams::allow(const std::vector<std::string> * devices, bool cpu, std::string & why) {
    may_stream(min_tokens);  // opens them
    uint64_t bits = devices ? 0 : ~uint64_t(0);
    for (const std::string & name : devices ? *devices : std::vector<std::string>()) {
        const auto found = std::find_if(devices_.begin(), devices_.end(), [&](const auto & d) { return d->gpu().name == name; });
        if (found == devices_.end()) {
            why = "nothing is streamed to a device '" + name + "'";
            return false;
        }
        const size_t i = size_t(found - devices_.begin());
        if (i < Permit::max_devices) bits |= uint64_t(1) << i;
    }
    permit().set(bits, cpu);
    return true;
}

void Streams::quiesce() {
    constexpr int64_t patience_ns = 1'000'000'000;
    if (pid_ != getpid()) return;
    for (const auto & d : devices_) d->quiesce(now_ns() + patience_ns);
}

void Streams::forget() {
    std::vector<DeviceStream *> open;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const auto & d : devices_) open.push_back(d.get());
    }
    ahead_.forget();
    for (DeviceStream * d : open) d->forget();
}

}  // namespace hybrid_moe
