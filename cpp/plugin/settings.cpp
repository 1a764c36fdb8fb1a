// Environment variables -> Settings.
#include "plugin/settings.h"

#include "plugin/weight_directory.h"
#include "stream/decimal.h"
#include "stream/trace.h"
#include "threads/team.h"
#include "threads/topology.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>

#include <unistd.h>

namespace hybrid_moe {
namespace {

Settings current;
thread_local std::optional<ExpertsMemory> of_this_thread;

bool parse(const char * name, ExpertsMemory & out) {
    if (!strcmp(name, "mmap")) out = ExpertsMemory::mmap;
    else if (!strcmp(name, "copy")) out = ExpertsMemory::copy;
    else if (!strcmp(name, "pinned")) out = ExpertsMemory::pinned;
    else return false;
    return true;
}

// Null when the variable leaves the choice to us.
const char * choice(const char * variable) {
    const char * value = getenv(variable);
    return value && *value && strcmp(value, "auto") ? value : nullptr;
}

std::string unknown(const char * variable, const char * value, const char * choices) {
    return std::string("hybrid-moe: ") + variable + "=" + value + " is not available here; choose " + choices;
}

// A misspelt name would leave its option off in silence. Some are read by the Python package and by tests alone.
constexpr const char * known_variables[] = {
    "HYBRID_MOE_ISA", "HYBRID_MOE_TEAM", "HYBRID_MOE_PIN", "HYBRID_MOE_EXPERTS_MEMORY", "HYBRID_MOE_DENSE_TYPE",
    "HYBRID_MOE_SLP", "HYBRID_MOE_DEVICES", "HYBRID_MOE_LAYER_DEVICES", "HYBRID_MOE_CPU_HELP", "HYBRID_MOE_VRAM_SHARE", "HYBRID_MOE_RING_MIB",
    "HYBRID_MOE_COPY_THREADS", "HYBRID_MOE_PINNED_GIB", "HYBRID_MOE_TRACE",
    "HYBRID_MOE_STATS", "HYBRID_MOE_UNTESTED_HOST", "HYBRID_MOE_LIBRARY", "HYBRID_MOE_LLAMA", "HYBRID_MOE_AVX512_RUNNER",
};

std::string misspelt_variable() {
    const std::string prefix = "HYBRID_MOE_";
    for (char ** v = environ; v && *v; v++) {
        if (strncmp(*v, prefix.c_str(), prefix.size()) != 0) continue;
        const std::string name(*v, strcspn(*v, "="));
        std::string all;
        bool is_known = false;
        for (const char * known : known_variables) {
            is_known = is_known || name == known;
            all += (all.empty() ? "" : ", ") + std::string(known);
        }
        if (!is_known) return "hybrid-moe: unknown environment variable " + name + "; known are " + all;
    }
    return std::string();
}

}  // namespace

std::vector<std::string> split_names(const std::string & list) {
    std::vector<std::string> names;
    for (size_t begin = 0; begin <= list.size();) {
        const size_t end = std::min(list.find(',', begin), list.size());
        const size_t first = list.find_first_not_of(' ', begin);
        const size_t last  = list.find_last_not_of(' ', end == 0 ? 0 : end - 1);
        if (first < end) names.push_back(list.substr(first, last - first + 1));
        begin = end + 1;
    }
    return names;
}

namespace {

// A number between low and high; false when the variable holds something else. Unset or "auto": as it is.
bool number(const char * variable, double low, double high, double & out) {
    const char * text = choice(variable);
    if (!text) return true;
    double value;
    if (!parse_decimal(text, value) || !(value >= low && value <= high)) return false;
    out = value;
    return true;
}

std::string read_stream_settings(StreamOptions & out) {
    if (const char * slp = choice("HYBRID_MOE_SLP")) {
        if (strcmp(slp, "on") && strcmp(slp, "off")) return unknown("HYBRID_MOE_SLP", slp, "auto, on or off");
        out.slp = strcmp(slp, "on") ? Slp::off : Slp::on;
    }
    if (const char * devices = choice("HYBRID_MOE_DEVICES")) {
        out.all_devices = false;
        if (strcmp(devices, "none")) out.devices = split_names(devices);
    }
    if (const char * help = choice("HYBRID_MOE_CPU_HELP")) {
        if (strcmp(help, "off")) return unknown("HYBRID_MOE_CPU_HELP", help, "auto or off");
        out.cpu_helps = false;
    }
    double ring_mib = 0;
    double copy_threads = std::max(1, std::min(4, machine().default_threads() / 4));
    if (!number("HYBRID_MOE_VRAM_SHARE", 0.01, 1.0, out.device.vram_share)) {
        return unknown("HYBRID_MOE_VRAM_SHARE", getenv("HYBRID_MOE_VRAM_SHARE"), "a number from 0.01 to 1, the share of free device memory");
    }
    if (!number("HYBRID_MOE_RING_MIB", 0, 1e9, ring_mib)) {
        return unknown("HYBRID_MOE_RING_MIB", getenv("HYBRID_MOE_RING_MIB"), "a number of MiB, or 0 for no limit");
    }
    if (!number("HYBRID_MOE_COPY_THREADS", 1, 64, copy_threads)) {
        return unknown("HYBRID_MOE_COPY_THREADS", getenv("HYBRID_MOE_COPY_THREADS"), "a number from 1 to 64");
    }
    out.device.ring_bytes   = size_t(ring_mib * double(1 << 20));
    out.device.copy_threads = int(copy_threads);
    const char * trace = getenv("HYBRID_MOE_TRACE");
    return trace && *trace ? open_trace(trace) : std::string();
}

}  // namespace

const Settings & settings() { return current; }

std::string read_settings() {
    if (std::string misspelt = misspelt_variable(); !misspelt.empty()) return misspelt;
    char error[256];
    const Kernels * kernels = select_kernels(choice("HYBRID_MOE_ISA"), error, sizeof error);
    if (!kernels) return std::string("hybrid-moe: ") + error;
    const char * team = choice("HYBRID_MOE_TEAM");
    if (!choose_team_provider(team)) return unknown("HYBRID_MOE_TEAM", team, "auto, openmp or pool");
    const char * pin = choice("HYBRID_MOE_PIN");
    if (!choose_pin_mode(pin)) return unknown("HYBRID_MOE_PIN", pin, "auto, on or off");
    const char * memory = getenv("HYBRID_MOE_EXPERTS_MEMORY");
    ExpertsMemory of_environment = ExpertsMemory::mmap;
    if (memory && *memory && !parse(memory, of_environment)) return unknown("HYBRID_MOE_EXPERTS_MEMORY", memory, "mmap, copy or pinned");
    double pinned_gib = 0;
    if (!number("HYBRID_MOE_PINNED_GIB", 0, 1e6, pinned_gib)) {
        return unknown("HYBRID_MOE_PINNED_GIB", getenv("HYBRID_MOE_PINNED_GIB"), "a number of GiB, or 0 for no limit");
    }
    if (pinned_gib > 0) current.pinned_bytes = uint64_t(pinned_gib * double(uint64_t(1) << 30));
    if (std::string wrong = read_stream_settings(current.stream); !wrong.empty()) return wrong;
    current.stream.device.kernels = kernels;
    Streams::get().choose(current.stream);
    Streams::get().set_guess(weight_of_next_layer);
    current.experts_memory  = of_environment;
    current.kernels         = kernels;
    current.default_threads = machine().default_threads();
    return std::string();
}

bool choose_experts_memory(const char * name) {
    ExpertsMemory chosen;
    if (name && !parse(name, chosen)) return false;
    of_this_thread.reset();
    if (name) of_this_thread = chosen;
    return true;
}

ExpertsMemory experts_memory() { return of_this_thread.value_or(current.experts_memory); }

}  // namespace hybrid_moe
