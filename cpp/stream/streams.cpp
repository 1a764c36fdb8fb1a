// Streams: the devices, from opening them to the process's end. What they do for a layer is in layer_passes.cpp.
#include "stream/streams.h"

#include "stream/streams_pass.h"
#include "stream/trace.h"

#include <unistd.h>

#include <algorithm>

namespace hybrid_moe {
namespace {

// Batches below are the CPU's without asking: nothing that streams whole experts can win.
constexpr int64_t min_tokens = 32;

// After so many failed layers in a row a device is left alone.
constexpr int max_failures = 3;

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

void Streams::count_failure(size_t i_device, const LayerJob & job) {
    const std::string & name = devices_[i_device]->gpu().name;
    note("failure " + name, job.reason + " while it ran experts of " + job.experts->name() + "; the CPU computes the layer instead");
    n_failed_jobs_++;
    if (++n_failures_[i_device] == max_failures) {
        note("given up " + name, name + " failed several times in a row: experts are not streamed to it any more");
    }
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
