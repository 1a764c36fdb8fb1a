// What the environment chooses, read once when a host loads us.
#pragma once

#include "kernels/kernels.h"
#include "stream/streams.h"

#include <string>

namespace hybrid_moe {

// Where experts are computed from: their files, as the host or we mapped them, copies in memory (moe/expert_copy.h), or
// memory that is pinned for devices (stream/pinned.h).
enum class ExpertsMemory { mmap, copy, pinned };

struct Settings {
    const Kernels * kernels         = nullptr;
    ExpertsMemory   experts_memory  = ExpertsMemory::mmap;  // of loads that say nothing else
    int             default_threads = 1;  // until the host sets a number
    StreamOptions   stream;
    uint64_t        pinned_bytes = UINT64_MAX;  // that may be pinned for experts
};

const Settings & settings();

// HYBRID_MOE_ISA: a kernel table's name. HYBRID_MOE_TEAM: "openmp" or "pool". HYBRID_MOE_PIN: "on" or "off". "auto", empty or
// unset: our choice. HYBRID_MOE_EXPERTS_MEMORY: "mmap", "copy" or "pinned". Those of streaming: docs/streaming.md.
// Returns an empty string, or one sentence that says which value is wrong and what may stand there.
std::string read_settings();

// "a, b" -> {"a", "b"}: how lists of devices are written.
std::vector<std::string> split_names(const std::string & list);

// For the loads of this thread: "mmap", "copy", or null for what the environment says. False when it is none of them.
bool choose_experts_memory(const char * name);
ExpertsMemory experts_memory();

}  // namespace hybrid_moe
