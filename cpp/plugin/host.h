// The ggml of whatever program loaded us: its functions, found at run time, so that one plug-in file serves hosts
// whose libraries have other names, sonames and versions. ggml's headers give types and declarations only; nothing of
// ggml is linked.
#pragma once

#include "ggml-backend-impl.h"
#include "ggml.h"

#include <string>

namespace hybrid_moe {

// One line per function we call. All must come from the same ggml.
#define HYBRID_MOE_HOST_FUNCTIONS(X) \
    X(ggml_version)                  \
    X(ggml_backend_buffer_init)      \
    X(ggml_graph_n_nodes)            \
    X(ggml_graph_node)               \
    X(ggml_nbytes)                   \
    X(ggml_op_name)                  \
    X(ggml_type_name)

using LogFunction = void (*)(ggml_log_level level, const char * format, ...);

struct Host {
#define HYBRID_MOE_DECLARE(name) decltype(&::name) name = nullptr;
    HYBRID_MOE_HOST_FUNCTIONS(HYBRID_MOE_DECLARE)
#undef HYBRID_MOE_DECLARE
    LogFunction log = nullptr;  // ggml_log_internal
    decltype(&::ggml_backend_dev_by_name) ggml_backend_dev_by_name = nullptr;  // lives in another library than the rest
    std::string library;  // path of the ggml-base that was bound
};

// Bound once by bind_host; before that every member is null.
const Host & host();

// Finds ggml in the process that holds `caller` (an address inside the library that calls us, to tell two copies
// of ggml apart). Returns an empty string, or one sentence that says what is missing or out of range.
std::string bind_host(const void * caller);

// The versions whose vtable layouts have been tried. Set HYBRID_MOE_UNTESTED_HOST=1 to go beyond.
constexpr int oldest_host[2] = {0, 20};
constexpr int newest_host[2] = {0, 25};

// Empty when the version (such as "0.25.3") may load us, else one sentence.
std::string judge_host_version(const char * version, bool allow_untested);

}  // namespace hybrid_moe
