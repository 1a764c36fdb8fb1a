// The books as JSON, and the CPU stage.
#include "simgpu_api.h"

#include "cpu_stage.h"
#include "sim_device.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace simgpu {

Engine & cpu_stage() {
    static Engine & engine = *new Engine;
    return engine;
}

double cpu_stage_ns(double n_read, double n_rows, double n_bytes, double bits_per_weight) {
    const double memory_ns  = n_read * n_bytes / settings().cpu_gbps;
    const double compute_ns = 2.0 * n_rows * n_bytes * 8 / bits_per_weight / (settings().cpu_tflops * 1e3);
    return std::max(memory_ns, compute_ns);
}

namespace {

using Fields = std::initializer_list<std::pair<const char *, int64_t>>;

std::string members(const Fields & fields) {
    std::string text;
    for (const auto & [name, value] : fields) {
        if (!text.empty()) text += ", ";
        text.append("\"").append(name).append("\": ").append(std::to_string(value));
    }
    return text;
}

std::string object(const Fields & fields) { return std::string("{").append(members(fields)).append("}"); }

std::string times(const Engine::Account & a) {
    return members({{"n", a.n},
                    {"modelled_ns", a.modelled_ns},
                    {"busy_ns", a.busy_ns},
                    {"n_overruns", a.n_overruns},
                    {"overrun_ns", a.overrun_ns}});
}

std::string link(const Engine::Account & a, const LinkBytes & bytes) {
    const int64_t pinned   = bytes.of_kind[copy_pinned];
    const int64_t pageable = bytes.of_kind[copy_pageable];
    const int64_t staged   = bytes.of_kind[copy_staged];
    std::string text = "{";
    text.append(times(a)).append(", ");
    text.append(members({{"bytes", pinned + pageable + staged},
                         {"pinned_bytes", pinned},
                         {"pageable_bytes", pageable},
                         {"staged_bytes", staged}}));
    return text.append("}");
}

std::string describe(const Device & d) {
    const Engine::Account up      = d.up.account();
    const Engine::Account down    = d.down.account();
    const Engine::Account compute = d.compute.account();
    std::string text = "{\"name\": \"";
    text.append(d.name).append("\", \"up\": ").append(link(up, d.up_bytes)).append(", \"down\": ").append(link(down, d.down_bytes));
    text.append(", \"compute\": {").append(times(compute)).append("}, \"overlap_ns\": ");
    text.append(object({{"up_compute", overlap_ns(up.busy, compute.busy)},
                        {"down_compute", overlap_ns(down.busy, compute.busy)},
                        {"up_down", overlap_ns(up.busy, down.busy)}}));
    text.append(", \"memory\": ");
    text.append(object({{"total", int64_t(d.memory.total())},
                        {"used", int64_t(d.memory.used())},
                        {"peak", int64_t(d.memory.peak())}}));
    text.append(", \"host_memory\": ");
    text.append(object({{"used", int64_t(d.host_memory.used())}, {"peak", int64_t(d.host_memory.peak())}}));
    text.append(", \"calls\": ");
    text.append(object({{"allocs", d.n_allocs},
                        {"host_allocs", d.n_host_allocs},
                        {"copies", d.n_copies},
                        {"ops", d.n_ops},
                        {"failed_copies", d.n_failed_copies}}));
    return text.append(", \"lost\": ").append(d.lost ? "true}" : "false}");
}

void empty(LinkBytes & bytes) {
    for (auto & n : bytes.of_kind) n = 0;
}

}  // namespace
}  // namespace simgpu

using namespace simgpu;

const char * simgpu_stats(void) {
    thread_local std::string text;
    text = "{\"devices\": [";
    for (size_t i = 0; i < n_devices(); i++) {
        if (i) text += ", ";
        text += describe(device_at(i));
    }
    text += "], \"cpu\": {" + times(cpu_stage().account()) + "}}";
    return text.c_str();
}

void simgpu_reset_stats(void) {
    for (size_t i = 0; i < n_devices(); i++) {
        Device & d = device_at(i);
        for (Engine * engine : {&d.up, &d.down, &d.compute}) engine->reset();
        empty(d.up_bytes);
        empty(d.down_bytes);
    }
    cpu_stage().reset();
}

int64_t simgpu_cpu_expert_ns(int64_t n_rows, size_t expert_bytes, double bits_per_weight) {
    if (n_rows < 0 || !(bits_per_weight > 0)) return -1;
    if (n_rows == 0) return 0;
    return std::llround(cpu_stage_ns(1, double(n_rows), double(expert_bytes), bits_per_weight));
}

int64_t simgpu_cpu_expert(int64_t n_rows, size_t expert_bytes, double bits_per_weight) {
    const int64_t ns = simgpu_cpu_expert_ns(n_rows, expert_bytes, bits_per_weight);
    if (ns > 0) sleep_until(cpu_stage().charge(now_ns(), ns, nullptr));
    return ns;
}
