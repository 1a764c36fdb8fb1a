// What the environment chooses, read once when a host loads us.
#pragma once

#include "kernels/kernels.h"

#include <string>

namespace hybrid_moe {

struct Settings {
    const Kernels * kernels         = nullptr;
    int             default_threads = 1;  // until the host sets a number
};

const Settings & settings();

// HYBRID_MOE_ISA: a kernel table's name. HYBRID_MOE_TEAM: "openmp" or "pool". HYBRID_MOE_PIN: "on" or "off". "auto", empty or
// unset: our choice. Returns an empty string, or one sentence that says which value is wrong and what may stand there.
std::string read_settings();

}  // namespace hybrid_moe
