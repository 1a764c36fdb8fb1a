// Streams: rates and the decision between CPU, devices, and both.
#include "stream/streams_pass.h"
#include "stream/trace.h"

#include <algorithm>
#include <cstdio>

namespace hybrid_moe {
namespace {

// Below, calibrating would cost more than streaming could ever win.
constexpr int64_t min_automatic_tokens = 64;

// A measurement's size: enough rows per expert for a rate, a few milliseconds on the machines this is for.
constexpr int64_t sample_tokens  = 2048;
constexpr int64_t few_tokens     = 32;
constexpr size_t  sample_experts = 4;

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

std::string text_of(const PartWeights & p) {
    return p.exists() ? std::string(name_of(p.weights.shape.type)) + " " + std::to_string(p.n_rows) + "x" + std::to_string(p.k()) : "-";
}

}  // namespace

std::string StreamPlan::print() const {
    char text[200];
    snprintf(text, sizeof text, "%s: %zu experts with rows; predicted %.3g ms on the CPU, %.3g ms on the devices; %zu experts for the CPU",
             why.c_str(), by_rows.size(), cpu_s * 1e3, devices_s * 1e3, streams ? n_cpu_experts : by_rows.size());
    return text;
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
    const auto time = [&](const MoeLayer & layer) {
        double best = 0;
        for (int i = 0; i < 2; i++) {
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
    if (pass.x && !pass.x->to_host()) return rates;
    Routing route;
    Pair bad;
    group_by_expert(sample.ids, pass.experts->n_expert(), route, bad);
    std::vector<QueuedExpert> busiest = sorted(route);
    if (busiest.size() > sample_experts) busiest.erase(busiest.begin() + std::ptrdiff_t(sample_experts), busiest.end());
    const Pass of_sample{sample, pass.experts, pass.options, pass.work, route, nullptr, {}};
    for (const size_t i : ready_devices(of_sample, make_index(sample, route))) {
        DeviceStream & d = *devices_[i];
        bool has_failed = false;
        for (int round = 0; round < 2 && !has_failed; round++) {  // the first one also pays for what is made once
            d.reset_rate();
            LayerJob job(sample, route, pass.experts, busiest, {DeviceRate{}}, false);
            d.start(job, 0);
            while (!d.finish(std::chrono::milliseconds(100))) {}
            has_failed = job.is_cancelled() && !job.is_damaged;
            if (has_failed) count_failure(i, job);
        }
        if (has_failed) std::erase(pass.devices, i);
    }
    rates.cpu     = calibrate_cpu(pass, sample);
    rates.devices = rates_of(pass.devices);
    return rates;
}

// Drops devices that have no room any more after a measurement.
Rates Streams::rates_for(Pass & pass) {
    std::string name = cpu_name() + "; " + std::to_string(pass.options.n_threads) + " threads; " + pass.options.kernels->name;
    for (const size_t i : pass.devices) name += "; " + devices_[i]->gpu().name + " " + devices_[i]->gpu().description;
    for (const PartWeights & p : pass.experts->parts) name += "; " + text_of(p);
    std::replace(name.begin(), name.end(), '\t', ' ');
    Rates rates;
    if (options_.slp == Slp::automatic && pass.layer.ids.n_tokens < min_automatic_tokens) return rates;
    if (const auto known = known_rates(name, pass.devices.size())) {
        rates = *known;
        for (size_t i = 0; i < pass.devices.size(); i++) devices_[pass.devices[i]]->know_rate(rates.devices[i]);
    } else {
        const size_t n_devices = pass.devices.size();
        rates = calibrate(pass);
        const bool all_measured = std::all_of(rates.devices.begin(), rates.devices.end(), [](const DeviceRate & r) {
            return r.copy_s_per_byte > 0 && r.compute_s_per_row > 0;  // zeros: it failed
        });
        const bool is_whole = rates.devices.size() == n_devices && rates.cpu.s_per_row > 0;
        if (is_whole && all_measured) keep_rates(name, rates);
        // The sample's batch was a smaller one, so that there may be no room now.
        const std::vector<size_t> ready = ready_devices(pass, make_index(pass.layer, pass.route));
        std::erase_if(pass.devices, [&](size_t i) { return std::find(ready.begin(), ready.end(), i) == ready.end(); });
    }
    rates.devices = rates_of(pass.devices);
    return rates;
}

StreamPlan Streams::decide(const Pass & pass, const Rates & rates) const {
    StreamPlan plan;
    plan.by_rows = sorted(pass.route);
    if (options_.slp == Slp::automatic && pass.layer.ids.n_tokens < min_automatic_tokens) {
        plan.why = "CPU, too few tokens";
        return plan;
    }
    const uint64_t bytes = pass.experts->device_bytes();
    double slowest = 0;
    for (const DeviceRate & d : rates.devices) slowest = std::max(slowest, d.copy_s_per_byte);
    // Activations go to every device, and sums come back.
    const MoeLayer & l = pass.layer;
    const double in  = pass.x ? 0 : double(l.ids.n_tokens * l.n_x_slots * l.up.weights.shape.k) * 4;
    const double out = double(l.ids.n_tokens * l.n_embd()) * 4;
    plan.devices_s = predict(plan.by_rows, bytes, rates.devices) + (in + out) * slowest;
    plan.cpu_s     = double(plan.by_rows.size()) * rates.cpu.s_per_expert + double(rows_of(plan.by_rows)) * rates.cpu.s_per_row;
    plan.streams   = options_.slp == Slp::on || plan.devices_s < plan.cpu_s;
    plan.why       = !plan.streams ? "CPU, predicted faster" : options_.slp == Slp::on ? "streamed, as chosen" : "streamed, predicted faster";
    if (plan.streams && options_.cpu_helps && rates.cpu.s_per_row > 0) {
        plan.n_cpu_experts = share_of_cpu(plan.by_rows, bytes, rates.devices, rates.cpu);
    }
    return plan;
}

}  // namespace hybrid_moe
