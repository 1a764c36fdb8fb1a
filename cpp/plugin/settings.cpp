// Environment variables -> Settings.
#include "plugin/settings.h"

#include "threads/team.h"
#include "threads/topology.h"

#include <cstdlib>
#include <cstring>
#include <optional>

#include <unistd.h>

namespace hybrid_moe {
namespace {

Settings current;
thread_local std::optional<ExpertsMemory> of_this_thread;

bool parse(const char * name, ExpertsMemory & out) {
    if (strcmp(name, "mmap") && strcmp(name, "copy")) return false;
    out = strcmp(name, "copy") ? ExpertsMemory::mmap : ExpertsMemory::copy;
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
    "HYBRID_MOE_STATS", "HYBRID_MOE_UNTESTED_HOST", "HYBRID_MOE_LIBRARY", "HYBRID_MOE_AVX512_RUNNER",
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
    if (memory && *memory && !parse(memory, of_environment)) return unknown("HYBRID_MOE_EXPERTS_MEMORY", memory, "mmap or copy");
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
