// How fast this machine computes and copies the experts of one kind of layer, measured once and kept in the user's cache,
// so that a prompt is only streamed where that is faster.
#pragma once

#include "stream/expert_queue.h"

#include <optional>
#include <string>
#include <vector>

namespace hybrid_moe {

struct Rates {
    CpuRate                 cpu;
    std::vector<DeviceRate> devices;
    std::string print() const;
};

// What was measured under that name, here or in an earlier process. Names have no tabs and no line ends.
std::optional<Rates> known_rates(const std::string & name, size_t n_devices);
void know_rates(const std::string & name, const Rates & rates);  // in this process only
void keep_rates(const std::string & name, const Rates & rates);

// The processor's name, as far as the system tells.
const std::string & cpu_name();

// $XDG_CACHE_HOME/hybrid-moe/rates-1.tsv, else below ~/.cache; empty when there is neither.
std::string rates_path();

}  // namespace hybrid_moe
