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

// What streaming to GPU devices calls besides; a host without one of them runs without streaming.
#define HYBRID_MOE_STREAM_FUNCTIONS(X)       \
    X(ggml_init)                             \
    X(ggml_reset)                            \
    X(ggml_free)                             \
    X(ggml_new_tensor_1d)                    \
    X(ggml_new_tensor_2d)                    \
    X(ggml_new_graph_custom)                 \
    X(ggml_graph_overhead_custom)            \
    X(ggml_tensor_overhead)                  \
    X(ggml_build_forward_expand)             \
    X(ggml_graph_add_node)                   \
    X(ggml_new_tensor_3d)                    \
    X(ggml_get_rows)                         \
    X(ggml_set_rows)                         \
    X(ggml_mul_mat)                          \
    X(ggml_add)                              \
    X(ggml_mul)                              \
    X(ggml_scale)                            \
    X(ggml_sqr)                              \
    X(ggml_clamp)                            \
    X(ggml_unary)                            \
    X(ggml_glu_split)                        \
    X(ggml_row_size)                         \
    X(ggml_backend_dev_name)                 \
    X(ggml_backend_dev_description)          \
    X(ggml_backend_dev_type)                 \
    X(ggml_backend_dev_memory)               \
    X(ggml_backend_dev_get_props)            \
    X(ggml_backend_dev_init)                 \
    X(ggml_backend_dev_supports_op)          \
    X(ggml_backend_dev_buffer_type)          \
    X(ggml_backend_dev_host_buffer_type)     \
    X(ggml_backend_dev_backend_reg)          \
    X(ggml_backend_reg_name)                 \
    X(ggml_backend_reg_get_proc_address)     \
    X(ggml_backend_buft_alloc_buffer)        \
    X(ggml_backend_buft_get_alignment)       \
    X(ggml_backend_buft_get_alloc_size)      \
    X(ggml_backend_buffer_get_base)          \
    X(ggml_backend_buffer_free)              \
    X(ggml_backend_tensor_alloc)             \
    X(ggml_backend_view_init)                \
    X(ggml_backend_tensor_set_async)         \
    X(ggml_backend_tensor_get_async)         \
    X(ggml_backend_tensor_memset)            \
    X(ggml_backend_tensor_copy)              \
    X(ggml_backend_tensor_get)               \
    X(ggml_backend_synchronize)              \
    X(ggml_backend_graph_compute_async)      \
    X(ggml_backend_free)                     \
    X(ggml_backend_event_new)                \
    X(ggml_backend_event_free)               \
    X(ggml_backend_event_record)             \
    X(ggml_backend_event_synchronize)

using LogFunction = void (*)(ggml_log_level level, const char * format, ...);

struct Host {
#define HYBRID_MOE_DECLARE(name) decltype(&::name) name = nullptr;
    HYBRID_MOE_HOST_FUNCTIONS(HYBRID_MOE_DECLARE)
    HYBRID_MOE_STREAM_FUNCTIONS(HYBRID_MOE_DECLARE)
#undef HYBRID_MOE_DECLARE
    LogFunction log = nullptr;  // ggml_log_internal
    // These live in another library than the rest, the registry's.
    decltype(&::ggml_backend_dev_by_name) ggml_backend_dev_by_name = nullptr;
    decltype(&::ggml_backend_dev_count)   ggml_backend_dev_count   = nullptr;
    decltype(&::ggml_backend_dev_get)     ggml_backend_dev_get     = nullptr;
    std::string library;  // path of the ggml-base that was bound
};

// Bound once by bind_host; before that every member is null.
const Host & host();

// Finds ggml in the process that holds `caller` (an address inside the library that calls us, to tell two copies
// of ggml apart). Returns an empty string, or one sentence that says what is missing or out of range.
std::string bind_host(const void * caller);

// A function that streaming needs and this host does not have; null when there is none.
const char * missing_for_streaming();

// The versions whose vtable layouts have been tried. Set HYBRID_MOE_UNTESTED_HOST=1 to go beyond.
constexpr int oldest_host[2] = {0, 20};
constexpr int newest_host[2] = {0, 25};

// Empty when the version (such as "0.25.3") may load us, else one sentence.
std::string judge_host_version(const char * version, bool allow_untested);

}  // namespace hybrid_moe
