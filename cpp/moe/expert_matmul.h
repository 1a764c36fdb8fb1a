// One expert projection for a batch of tokens: y[token][slot] = W[ids[token][slot]] x[token][slot]. Plain numbers and
// pointers, filled by the plug-in's describe step; no ggml.
#pragma once

#include "moe/expert_tensor.h"

#include <vector>

namespace hybrid_moe {

// Where the experts' bytes are: in one piece (GGUF), or one pointer per expert (`scattered`, a checkpoint).
struct ExpertWeights {
    const char *        name = "";
    ExpertTensor::Shape shape{};
    const uint8_t *     base         = nullptr;
    size_t              expert_bytes = 0;
    ExpertTensor *      scattered    = nullptr;

    bool is_ready(int64_t i_expert) const { return !scattered || scattered->is_ready(i_expert); }
    ExpertMatrix matrix(int64_t i_expert) const {
        if (scattered) return scattered->matrix(i_expert);
        return {shape.type, base + size_t(i_expert) * expert_bytes, shape.row_bytes, shape.n_rows, shape.k, nullptr, 0, 0};
    }
};

struct ExpertMatmul {
    ExpertWeights   experts;
    int64_t         n_tokens = 0;
    int64_t         n_used   = 0;
    const uint8_t * ids = nullptr;  // [n_tokens][n_used] int32, strides in bytes
    int64_t ids_token_stride = 0;
    int64_t ids_slot_stride  = 0;
    const uint8_t * x = nullptr;    // [n_tokens][n_x_slots][k] floats; slot s reads row s % n_x_slots
    int64_t n_x_slots      = 1;
    int64_t x_token_stride = 0;
    int64_t x_slot_stride  = 0;
    uint8_t * y = nullptr;          // [n_tokens][n_used][n_rows] floats
    int64_t y_token_stride = 0;
    int64_t y_slot_stride  = 0;
};

// Rows grouped by expert: expert i owns pairs [begin[i], begin[i + 1]) of x and y.
struct Routing {
    std::vector<int64_t>       begin;   // [n_expert + 1]
    std::vector<int64_t>       active;  // experts with at least one row
    std::vector<const float *> x;       // [n_tokens x n_used]
    std::vector<float *>       y;
};

// How the layer is cut: tiles of consecutive output rows of one expert, taken by the threads as they come free.
struct Plan {
    int     n_threads = 1;
    int64_t tile_rows = 0;
    int64_t n_tiles_per_expert = 0;
};

// Working memory that survives between layers, so that a steady state allocates nothing.
struct Workspace {
    Routing              routing;
    std::vector<uint8_t> panels;  // [n_threads] panels, cache-line aligned by hand
};

struct RunOptions {
    const Kernels * kernels;
    int n_threads;
    bool (*abort)(void *);  // may be null; asked before each expert
    void * abort_data;
};

enum class RunStatus { ok, aborted, failed };

// Runs it. On failure `error` (at least 512 bytes) holds one sentence: ids out of range, or damaged weights.
RunStatus run_expert_matmul(const ExpertMatmul & op, const RunOptions & options, Workspace & work, char * error);

// What ran since the process started; for reports and for tests that must not pass on another path.
struct Counters {
    uint64_t n_matmuls;
    uint64_t n_rows;          // token rows x experts
    uint64_t weight_bytes;    // bytes of the experts that were read, each matmul counted once per active expert
    uint64_t n_dot_experts;   // experts served by the dot kernel
    uint64_t n_gemm_experts;  // experts served by the gemm kernel
};
Counters counters();

}  // namespace hybrid_moe
