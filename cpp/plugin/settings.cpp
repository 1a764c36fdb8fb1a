// Environment variables -> Settings.
#include "plugin/settings.h"

#include "threads/team.h"
#include "threads/topology.h"

#include <cstdlib>

namespace hybrid_moe {
namespace {

Settings current;

}  // namespace

const Settings & settings() { return current; }

std::string read_settings() {
    char error[256];
    const Kernels * kernels = select_kernels(getenv("HYBRID_MOE_ISA"), error, sizeof error);
    if (!kernels) return std::string("hybrid-moe: ") + error;
    const char * team = getenv("HYBRID_MOE_TEAM");
    if (!choose_team_provider(team)) {
        return std::string("hybrid-moe: HYBRID_MOE_TEAM=") + team + " is not available here; choose openmp or pool";
    }
    current.kernels         = kernels;
    current.default_threads = machine().default_threads();
    return std::string();
}

}  // namespace hybrid_moe
