// Streams: rates and the decision between CPU, devices, and both.
#include "stream/decimal.h"
#include "stream/streams_pass.h"
#include "stream/trace.h"

#include <algorithm>

namespace hybrid_moe {
namespace {

// A measurement's size: enough rows per expert for a rate, a few milliseconds on the machines this is for.
constexpr int64_t sample_tokens  = 2048;
constexpr int64_t few_tokens     = 32;
constexpr size_t  sample_experts = 4;
constexpr int     device_repeats = 8;     // of their computation, so that this thread's waking up does not count
constexpr int     max_cpu_samples = 10;
constexpr double  cpu_sample_s    = 0.03;

std::vector<QueuedExpert> sorted(const Routing & route) {
    std::vector<QueuedExpert> all;
    for (const int64_t e : route.active) all.push_back({e, route.n_rows(e)});
    std::stable_sort(all.begin(), all.end(), [](const QueuedExpert & a, const QueuedExpert & b) { return a.n_rows > b.n_rows; });
    return all;
}

int64_t rows_of(const std::vector<QueuedExpert> & experts) {
    int64_t n = 0;
    for (const QueuedExpert & e : experts) n += e.n_rows;
    return n;
}

double seconds_of(int64_t begin_ns) { return double(now_ns() - begin_ns) * 1e-9; }

// Whether the CPU may compute long batches of this thread, or parts of them.
bool cpu_is_free() { return this_thread_is_first() || permit().has_cpu(); }

bool all_have_rates(const std::vector<DeviceRate> & rates) {
    return std::all_of(rates.begin(), rates.end(), [](const DeviceRate & r) { return r.copy_s_per_byte > 0 && r.compute_s_per_row > 0; });
}

std::string text_of(const LayerExperts & experts) {
    std::string text = std::to_string(experts.n_expert()) + " experts";
    for (const PartWeights & p : experts.parts) {
        if (!p.exists()) continue;
        const std::string type = host().ggml_type_name(ggml_type(p.weights.host_type));
        text += "; " + type + " " + std::to_string(p.n_rows) + "x" + std::to_string(p.k());
    }
    return text;
}

}  // namespace

std::string StreamPlan::print() const {
    return why + ": " + std::to_string(by_rows.size()) + " experts with rows; predicted " + decimal(cpu_s * 1e3, 3) + " ms on the CPU, " +
           decimal(devices_s * 1e3, 3) + " ms on the devices; " + std::to_string(streams ? n_cpu_experts : by_rows.size()) + " experts for the CPU";
}

CpuRate Streams::calibrate_cpu(const Pass & pass, const MoeLayer & sample) {
    Routing route;
    Pair bad;
    group_by_expert(sample.ids, pass.experts->n_expert(), route, bad);
    std::vector<QueuedExpert> busiest = sorted(route);
    if (busiest.size() > 2) busiest.erase(busiest.begin() + 2, busiest.end());
    std::vector<char> only(size_t(pass.experts->n_expert()), 0);
    for (const QueuedExpert & e : busiest) only[size_t(e.expert)] = 1;
    MoeLayer few = sample;
    few.ids.n_tokens = std::min(few_tokens, sample.ids.n_tokens);
    Routing few_route;
    group_by_expert(few.ids, pass.experts->n_expert(), few_route, bad);
    keep_experts(few_route, only);
    char error[512];
    // The best of several: others may be busy on this machine, and what is measured is kept.
    const auto time = [&](const MoeLayer & layer) {
        double best = 0;
        const int64_t first = now_ns();
        for (int i = 0; i < 2 || (i < max_cpu_samples && seconds_of(first) < cpu_sample_s); i++) {
            const int64_t begin = now_ns();
            if (run_moe_layer(layer, pass.options, pass.work, error, &only) != RunStatus::ok) return 0.0;
            const double s = seconds_of(begin);
            best = i == 0 ? s : std::min(best, s);
        }
        return best;
    };
    const double few_s = time(few);
    const double all_s = time(sample);
    const double few_rows = double(few_route.pairs.size());
    const double all_rows = double(rows_of(busiest));
    CpuRate rate;
    rate.s_per_row    = all_rows > few_rows ? std::max(0.0, all_s - few_s) / (all_rows - few_rows) : 0;
    rate.s_per_expert = few_route.active.empty() ? 0 : std::max(0.0, few_s - few_rows * rate.s_per_row) / double(few_route.active.size());
    return rate;
}

// The layer's first tokens and busiest experts, on each device by itself and on the CPU. What it writes to y is written again.
// A device that fails takes no further part in the pass.
Rates Streams::calibrate(Pass & pass) {
    Rates rates;
    MoeLayer sample = pass.layer;
    sample.ids.n_tokens = std::min(sample_tokens, sample.ids.n_tokens);
    if (pass.x) pass.x->to_host();
    Routing route;
    Pair bad;
    group_by_expert(sample.ids, pass.experts->n_expert(), route, bad);
    std::vector<QueuedExpert> busiest = sorted(route);
    if (busiest.size() > sample_experts) busiest.erase(busiest.begin() + std::ptrdiff_t(sample_experts), busiest.end());
    const Pass of_sample{sample, pass.experts, pass.options, pass.work, route, nullptr, pass.devices, pass.cpu_may_help};
    for (const size_t i : ready_devices(of_sample, make_index(sample, route))) {
        DeviceStream & d = *devices_[i];
        bool has_failed = false;
        for (int round = 0; round < 2 && !has_failed; round++) {  // the first one also pays for what is made once
            d.reset_rate();
            LayerJob job(sample, route, pass.experts, busiest, {DeviceRate{}}, false);
            job.n_repeats = device_repeats;
            d.start(job, 0);
            while (!d.finish(std::chrono::milliseconds(100))) {}
            has_failed = job.is_cancelled() && !job.is_damaged;
            if (has_failed) count_failure(i, job);
        }
        if (has_failed) std::erase(pass.devices, i);
    }
    if (pass.layer.has_kernels() && cpu_is_free()) rates.cpu = calibrate_cpu(pass, sample);
    rates.devices = rates_of(pass.devices);
    return rates;
}

std::string Streams::name_of_rates(const Pass & pass) const {
    std::string name = cpu_name() + "; " + std::to_string(pass.options.n_threads) + " threads; " + pass.options.kernels->name;
    for (const size_t i : pass.devices) name += "; " + devices_[i]->gpu().name + " " + devices_[i]->gpu().description;
    name += "; " + text_of(*pass.experts);
    std::replace(name.begin(), name.end(), '\t', ' ');
    return name;
}

// Of pass.devices: as seen by now, or as measured before, or measured now (which may find that some have no room).
Rates Streams::rates_for(Pass & pass) {
    const std::string name = name_of_rates(pass);
    Rates rates;
    if (const auto known = known_rates(name, pass.devices.size())) {
        rates = *known;
        for (size_t i = 0; i < pass.devices.size(); i++) devices_[pass.devices[i]]->know_rate(rates.devices[i]);
    } else if (cpu_is_free() || !all_have_rates(rates_of(pass.devices))) {
        const size_t n_devices = pass.devices.size();
        rates = calibrate(pass);
        const bool is_measured = all_have_rates(rates.devices);  // zeros: it failed
        const bool none_failed = rates.devices.size() == n_devices;
        const bool is_whole = none_failed && is_measured && (rates.cpu.s_per_row > 0 || !pass.layer.has_kernels());
        if (is_whole) keep_rates(name, rates);
        else if (none_failed && cpu_is_free()) know_rates(name, rates);  // there was no room: not again for every layer
    }
    rates.devices = rates_of(pass.devices);
    if (!pass.layer.has_kernels()) {
        const std::lock_guard<std::mutex> lock(mutex_);
        rates.cpu.s_per_row = stock_s_per_row_[text_of(*pass.experts)];
    }
    return rates;
}

// A layer that the CPU ran: what it took corrects what was measured, for as long as this process lives.
void Streams::correct_cpu(const Pass & pass, Rates rates, double predicted_s, double seen_s) {
    if (!(predicted_s > 0) || rates.devices.size() != pass.devices.size()) return;
    const double factor = (1 + std::clamp(seen_s / predicted_s, 0.1, 10.0)) / 2;
    rates.cpu.s_per_expert *= factor;
    rates.cpu.s_per_row *= factor;
    know_rates(name_of_rates(pass), rates);
}

void Streams::learn_cpu(const MoeLayer & layer, double seconds) {
    const double rows = double(layer.ids.n_tokens * layer.ids.n_used);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (rows > 0) stock_s_per_row_[text_of(experts_of(layer))] = seconds / rows;
}

StreamPlan Streams::decide(const Pass & pass, const Rates & rates) const {
    StreamPlan plan;
    plan.by_rows = sorted(pass.route);
    const uint64_t bytes = pass.experts->source_bytes();
    double slowest = 0;
    for (const DeviceRate & d : rates.devices) slowest = std::max(slowest, d.copy_s_per_byte);
    // Activations go to every device, and sums come back.
    const MoeLayer & l = pass.layer;
    const double in  = pass.x ? 0 : double(l.ids.n_tokens * l.n_x_slots * l.up.weights.shape.k) * 4;
    const double out = double(l.ids.n_tokens * l.n_embd()) * 4;
    const double activations_s = (in + out) * slowest;
    const auto cpu_s = [&](const CpuRate & rate, size_t n_idlest) {
        const auto first = plan.by_rows.end() - std::ptrdiff_t(n_idlest);
        return double(n_idlest) * rate.s_per_expert + double(rows_of(std::vector<QueuedExpert>(first, plan.by_rows.end()))) * rate.s_per_row;
    };
    plan.cpu_s     = cpu_s(rates.cpu, plan.by_rows.size());
    plan.devices_s = predict(plan.by_rows, bytes, rates.devices) + activations_s;
    if (pass.cpu_may_help && l.has_kernels() && rates.cpu.s_per_row > 0 && !plan.by_rows.empty()) {
        const double fewer = double(pass.options.n_threads) / helping_threads(pass.options.n_threads, rates.devices.size());
        const CpuRate helping = {rates.cpu.s_per_expert * fewer, rates.cpu.s_per_row * fewer};
        // Without any left for devices it would not be help.
        const size_t n = std::min(share_of_cpu(plan.by_rows, bytes, rates.devices, helping), plan.by_rows.size() - 1);
        const std::vector<QueuedExpert> rest(plan.by_rows.begin(), plan.by_rows.end() - std::ptrdiff_t(n));
        const double both_s = std::max(cpu_s(helping, n), predict(rest, bytes, rates.devices)) + activations_s;
        if (both_s < plan.devices_s) {
            plan.devices_s     = both_s;
            plan.n_cpu_experts = n;
        }
    }
    plan.streams = options_.slp == Slp::on || plan.devices_s < plan.cpu_s || !cpu_is_free();
    plan.why     = !plan.streams ? "CPU, predicted faster"
                 : !cpu_is_free() ? "streamed, the CPU is left to decode"
                 : options_.slp == Slp::on ? "streamed, as chosen" : "streamed, predicted faster";
    return plan;
}

}  // namespace hybrid_moe
