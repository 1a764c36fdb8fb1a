// Environment variables -> Settings.
#include "plugin/settings.h"

#include "threads/team.h"
#include "threads/topology.h"

#include <cstdlib>
#include <cstring>

namespace hybrid_moe {
namespace {

Settings current;

// Null when the variable leaves the choice to us.
const char * choice(const char * variable) {
    const char * value = getenv(variable);
    return value && *value && strcmp(value, "auto") ? value : nullptr;
}

std::string unknown(const char * variable, const char * value, const char * choices) {
    return std::string("hybrid-moe: ") + variable + "=" + value + " is not available here; choose " + choices;
}

}  // namespace

const Settings & settings() { return current; }

std::string read_settings() {
    char error[256];
    const Kernels * kernels = select_kernels(choice("HYBRID_MOE_ISA"), error, sizeof error);
    if (!kernels) return std::string("hybrid-moe: ") + error;
    const char * team = choice("HYBRID_MOE_TEAM");
    if (!choose_team_provider(team)) return unknown("HYBRID_MOE_TEAM", team, "auto, openmp or pool");
    const char * pin = choice("HYBRID_MOE_PIN");
    if (!choose_pin_mode(pin)) return unknown("HYBRID_MOE_PIN", pin, "auto, on or off");
    current.kernels         = kernels;
    current.default_threads = machine().default_threads();
    return std::string();
}

}  // namespace hybrid_moe
