// Environment variables -> Settings. A variable nobody knows is an error: a misspelt fault would test nothing.
#include "settings.h"

#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>

namespace simgpu {
namespace {

Settings current;

bool parse(const std::string & text, double & out) {
    char * end = nullptr;
    out = strtod(text.c_str(), &end);
    return !text.empty() && !*end && std::isfinite(out) && !isspace(static_cast<unsigned char>(text[0]));
}

bool parse(const std::string & text, int64_t & out) {
    double value;
    if (!parse(text, value) || value != std::floor(value) || std::fabs(value) > 1e15) return false;
    out = int64_t(value);
    return true;
}

bool positive(const std::string & text, double & out) { return parse(text, out) && out > 0; }
bool not_negative(const std::string & text, double & out) { return parse(text, out) && out >= 0; }
bool count(const std::string & text, int64_t & out) { return parse(text, out) && out >= 0; }

bool between(const std::string & text, int64_t least, int64_t most, int64_t & out) {
    return parse(text, out) && out >= least && out <= most;
}

bool flag(const std::string & text, bool & out) {
    out = text == "1";
    return text == "0" || text == "1";
}

bool rate(const std::string & text, Rate & out) {
    const size_t slash = text.find('/');
    if (slash == std::string::npos) return positive(text, out.up) && positive(text, out.down);
    return positive(text.substr(0, slash), out.up) && positive(text.substr(slash + 1), out.down);
}

bool fault(const std::string & text, FaultAt & out) {
    out.onwards = !text.empty() && text.back() == '+';
    return count(out.onwards ? text.substr(0, text.size() - 1) : text, out.n);
}

bool lost_at(const std::string & text, FaultAt & out) {
    out.onwards = true;
    return count(text, out.n);
}

bool stall(const std::string & text, Stall & out) {
    const size_t colon = text.find(':');
    if (colon == std::string::npos) return text == "0";
    return count(text.substr(0, colon), out.n) && not_negative(text.substr(colon + 1), out.ms);
}

bool mode(const std::string & text, Settings & out) {
    out.computes    = text == "exact";
    out.moves_bytes = out.computes || text == "copies";
    return out.moves_bytes || text == "timing";
}

struct MachineOption {
    const char * name;
    const char * rule;
    bool (*parse)(const std::string & text, Settings & out);
};

const std::vector<MachineOption> & machine_options() {
    static const std::vector<MachineOption> all = {
        {"SIMGPU_DEVICES", "1 to 16", [](auto & t, auto & s) { return between(t, 1, 16, s.n_devices); }},
        {"SIMGPU_MODE", "exact, copies or timing", mode},
        {"SIMGPU_THREADS", "1 to 256", [](auto & t, auto & s) { return between(t, 1, 256, s.n_threads); }},
        {"SIMGPU_PAGEABLE_BLOCKS", "0 or 1", [](auto & t, auto & s) { return flag(t, s.pageable_blocks); }},
        {"SIMGPU_FP8", "0 or 1", [](auto & t, auto & s) { return flag(t, s.expands_fp8); }},
        {"SIMGPU_EXPERTS", "0 or 1", [](auto & t, auto & s) { return flag(t, s.takes_experts); }},
        {"SIMGPU_PINNED_SHARED", "0 or 1", [](auto & t, auto & s) { return flag(t, s.pinned_shared); }},
        {"SIMGPU_CPU_GBPS", "a number above 0", [](auto & t, auto & s) { return positive(t, s.cpu_gbps); }},
        {"SIMGPU_CPU_TFLOPS", "a number above 0", [](auto & t, auto & s) { return positive(t, s.cpu_tflops); }},
    };
    return all;
}

struct DeviceOption {
    const char * name;
    const char * rule;
    bool (*parse)(const std::string & text, DeviceSettings & out);
};

const std::vector<DeviceOption> & device_options() {
    static const char * above  = "a number above 0";
    static const char * rates  = "GB/s above 0, or UP/DOWN such as 32/28";
    static const char * faults = "0 (never), N (the N-th call) or N+ (from the N-th on)";
    static const std::vector<DeviceOption> all = {
        {"SIMGPU_MEMORY_MIB", above, [](auto & t, auto & d) { return positive(t, d.memory_mib); }},
        {"SIMGPU_MAX_TENSOR_MIB", "a number, 0 for no limit",
         [](auto & t, auto & d) { return not_negative(t, d.max_tensor_mib); }},
        {"SIMGPU_HOST_MEMORY_MIB", "a number, 0 for no limit",
         [](auto & t, auto & d) { return not_negative(t, d.host_memory_mib); }},
        {"SIMGPU_PINNED_GBPS", rates, [](auto & t, auto & d) { return rate(t, d.pinned); }},
        {"SIMGPU_PAGEABLE_GBPS", rates, [](auto & t, auto & d) { return rate(t, d.pageable); }},
        {"SIMGPU_STAGED_GBPS", rates, [](auto & t, auto & d) { return rate(t, d.staged); }},
        {"SIMGPU_LATENCY_US", "a number, 0 or more", [](auto & t, auto & d) { return not_negative(t, d.latency_us); }},
        {"SIMGPU_TFLOPS", above, [](auto & t, auto & d) { return positive(t, d.tflops); }},
        {"SIMGPU_MEMORY_GBPS", above, [](auto & t, auto & d) { return positive(t, d.memory_gbps); }},
        {"SIMGPU_LAUNCH_US", "a number, 0 or more", [](auto & t, auto & d) { return not_negative(t, d.launch_us); }},
        {"SIMGPU_SLOW", above, [](auto & t, auto & d) { return positive(t, d.slow); }},
        {"SIMGPU_OFFLOAD_ROWS", "a count, 0 for never", [](auto & t, auto & d) { return count(t, d.offload_rows); }},
        {"SIMGPU_FAIL_ALLOC", faults, [](auto & t, auto & d) { return fault(t, d.fail_alloc); }},
        {"SIMGPU_FAIL_HOST_ALLOC", faults, [](auto & t, auto & d) { return fault(t, d.fail_host_alloc); }},
        {"SIMGPU_FAIL_COPY", faults, [](auto & t, auto & d) { return fault(t, d.fail_copy); }},
        {"SIMGPU_LOSE_AT", "0 (never) or the number of an op", [](auto & t, auto & d) { return lost_at(t, d.lose_at); }},
        {"SIMGPU_STALL", "0 (never) or OP:MILLISECONDS such as 7:50", [](auto & t, auto & d) { return stall(t, d.stall); }},
    };
    return all;
}

// "32,8" -> {"32", "8"}
std::vector<std::string> split(const std::string & text) {
    std::vector<std::string> parts;
    for (size_t at = 0;;) {
        const size_t comma = text.find(',', at);
        parts.push_back(text.substr(at, comma - at));
        if (comma == std::string::npos) return parts;
        at = comma + 1;
    }
}

std::string refusal(const std::string & name, const std::string & value, const std::string & rule) {
    return "simgpu: " + name + "=" + value + " is wrong; it takes " + rule;
}

// One value per device, the last for all further ones; an empty one leaves the default.
std::string read_device_option(const DeviceOption & option, const std::string & text) {
    const std::vector<std::string> parts = split(text);
    if (parts.size() > current.devices.size()) {
        return refusal(option.name, text, "one value per device, and there are " + std::to_string(current.devices.size()));
    }
    for (size_t i = 0; i < current.devices.size(); i++) {
        const std::string & part = parts[i < parts.size() ? i : parts.size() - 1];
        if (!part.empty() && !option.parse(part, current.devices[i])) return refusal(option.name, text, option.rule);
    }
    return std::string();
}

bool is_known(const std::string & name) {
    for (const MachineOption & option : machine_options()) if (name == option.name) return true;
    for (const DeviceOption & option : device_options()) if (name == option.name) return true;
    return false;
}

std::string unknown_variable() {
    for (char ** entry = environ; entry && *entry; entry++) {
        const std::string name(*entry, strcspn(*entry, "="));
        if (name.rfind("SIMGPU_", 0) != 0 || is_known(name)) continue;
        std::string all;
        for (const MachineOption & option : machine_options()) all += std::string(" ") + option.name;
        for (const DeviceOption & option : device_options()) all += std::string(" ") + option.name;
        return "simgpu: " + name + " is no setting; there are:" + all;
    }
    return std::string();
}

}  // namespace

const Settings & settings() { return current; }

std::string read_settings() {
    current = Settings();
    std::string sentence = unknown_variable();
    for (const MachineOption & option : machine_options()) {
        const char * value = getenv(option.name);
        if (!sentence.empty() || !value || !*value) continue;
        if (!option.parse(value, current)) sentence = refusal(option.name, value, option.rule);
    }
    if (sentence.empty() && current.takes_experts && current.moves_bytes) {
        sentence = refusal("SIMGPU_EXPERTS", "1", "SIMGPU_MODE=timing beside it: experts are charged and not computed");
    }
    if (!sentence.empty()) return sentence;
    current.devices.assign(size_t(current.n_devices), DeviceSettings());
    for (const DeviceOption & option : device_options()) {
        const char * value = getenv(option.name);
        if (!sentence.empty() || !value || !*value) continue;
        sentence = read_device_option(option, value);
    }
    return sentence;
}

}  // namespace simgpu
