// Streams: what happened, as JSON.
#include "stream/decimal.h"
#include "stream/json_text.h"
#include "stream/streams.h"

namespace hybrid_moe {
namespace {

std::string field(const char * name, uint64_t n) { return std::string(", \"") + name + "\": " + std::to_string(n); }

std::string field(const char * name, double v) { return std::string(", \"") + name + "\": " + decimal(v, 6); }

// `value`: JSON already.
std::string field(const char * name, const std::string & value) { return std::string(", \"") + name + "\": " + value; }

std::string yes(bool is_so) { return is_so ? "true" : "false"; }

std::string describe(const DeviceStream & d, int n_failures) {
    const StreamCounters c = d.counters();
    const DeviceRate rate = d.rate();
    std::string text = "{\"name\": " + json_text(d.gpu().name) + field("description", json_text(d.gpu().description));
    text += field("layers", c.n_layers) + field("experts", c.n_experts) + field("rows", c.n_rows);
    text += field("source_bytes", c.source_bytes) + field("expert_bytes", c.expert_bytes) + field("ahead_bytes", c.ahead_bytes) +
            field("wasted_bytes", c.wasted_bytes) + field("in_bytes", c.in_bytes) + field("out_bytes", c.out_bytes);
    text += field("upload_ns", uint64_t(c.upload_ns)) + field("compute_ns", uint64_t(c.compute_ns)) +
            field("starved_ns", uint64_t(c.starved_ns)) + field("layer_ns", uint64_t(c.layer_ns));
    text += field("failures", c.n_failures) + field("failures_in_a_row", uint64_t(n_failures));
    text += field("slots", uint64_t(d.n_slots())) + field("slot_bytes", uint64_t(d.slot_bytes())) +
            field("batch_bytes", uint64_t(d.batch_bytes())) + field("host_bytes", uint64_t(d.host_bytes()));
    text += field("direct_bytes", d.filler().direct_bytes()) + field("staged_bytes", d.filler().staged_bytes());
    text += field("fp8", json_text(d.fp8_path())) + field("pinned_staging", yes(d.filler().is_pinned()));
    text += field("copy_s_per_byte", rate.copy_s_per_byte) + field("compute_s_per_row", rate.compute_s_per_row);
    return text + "}";
}

}  // namespace

std::string Streams::report() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::string devices, troubles;
    std::string allowed;
    for (size_t i = 0; i < devices_.size(); i++) {
        if (!permit().has_device(i)) continue;
        if (!allowed.empty()) allowed += ',';
        allowed += devices_[i]->gpu().name;
    }
    for (size_t i = 0; i < devices_.size(); i++) devices += (i ? ", " : "") + describe(*devices_[i], n_failures_[i]);
    for (const auto & [kind, sentence] : troubles_) troubles += (troubles.empty() ? "" : ", ") + json_text(sentence);
    const char * slp = options_.slp == Slp::on ? "on" : options_.slp == Slp::off ? "off" : "auto";
    std::string text = "{\"slp\": " + json_text(slp);
    text += field("layers", n_streamed_.load()) + field("layers_on_cpu", n_on_cpu_.load()) + field("cpu_experts", n_cpu_experts_.load());
    text += field("plan", json_text(last_plan_)) + field("rates", json_text(last_rates_));
    text += field("allowed", json_text(allowed)) + field("cpu_may_help", yes(permit().has_cpu()));
    text += field("devices", "[" + devices + "]") + field("troubles", "[" + troubles + "]");
    return text + "}";
}

}  // namespace hybrid_moe
