// One expert projection for a batch of tokens: y[token][slot] = W[ids[token][slot]] x[token][slot]. Plain numbers and
// pointers, filled by the plug-in's describe step; no ggml.
#pragma once

#include "moe/expert_tensor.h"
#include "moe/lanes.h"
#include "moe/routing.h"

#include <atomic>
#include <memory>
#include <vector>

namespace hybrid_moe {

// Where the experts' bytes are: in one piece (GGUF), or wherever `scattered` says (a checkpoint, or a copy in memory).
struct ExpertWeights {
    const char *        name = "";
    ExpertTensor::Shape shape{};
    const uint8_t *     base         = nullptr;
    size_t              expert_bytes = 0;
    ExpertTensor *      scattered    = nullptr;
    int                 host_type    = 0;  // the host's number of the type
    bool                end_is_told  = false;  // they lie in a buffer of ours: Streams::forget is called before it goes

    const std::vector<RowPart> & parts() const {
        static const std::vector<RowPart> none;
        return scattered ? scattered->parts() : none;
    }
    bool is_ready(int64_t i_expert) const { return !scattered || scattered->is_ready(i_expert); }
    // One expert from `row` on; only rows before row_end may be read.
    ExpertMatrix matrix(int64_t i_expert, int64_t row, int64_t & row_end) const {
        if (scattered) return scattered->matrix(i_expert, row, row_end);
        row_end = shape.n_rows;
        return {shape.type, base + size_t(i_expert) * expert_bytes, shape.row_bytes, shape.n_rows, shape.k, nullptr, 0, 0};
    }
};

struct ExpertMatmul {
    ExpertWeights   experts;
    ExpertIds       ids{};
    const uint8_t * x = nullptr;    // [n_tokens][n_x_slots][k] floats; slot s reads row s % n_x_slots
    int64_t n_x_slots      = 1;
    int64_t x_token_stride = 0;
    int64_t x_slot_stride  = 0;
    uint8_t * y = nullptr;          // [n_tokens][n_used][n_rows] floats
    int64_t y_token_stride = 0;
    int64_t y_slot_stride  = 0;
};

// Working memory that survives between layers, so that a steady state allocates nothing. It grows to the largest batch
// seen; its size depends on tokens and widths, not on the number of experts.
struct Workspace {
    Routing                    routing;
    std::vector<const float *> x;            // per pair of the routing
    std::vector<float *>       y;
    std::vector<const float *> h;
    std::vector<float>         pair_weight;
    std::vector<float *>       token_y;      // per token
    std::vector<float *>       tile_y;       // per thread and row of a tile
    Lanes                      up_tiles, down_tiles;
    std::unique_ptr<std::atomic<int32_t>[]> up_done;  // per active expert
    size_t                     n_up_done = 0;
    std::vector<uint8_t>       scratch;      // cut up by whoever runs
    std::vector<uint8_t>       x_copy, ids_copy, weights_copy;
};

struct RunOptions {
    const Kernels * kernels;
    int n_threads;
    bool (*abort)(void *);  // may be null; asked before each tile, as must_abort says
    void * abort_data;
};

// By the thread that called us alone: a host's callback may be bound to its thread, and stock ggml asks there too.
inline bool must_abort(const RunOptions & options, int i_thread) {
    return i_thread == 0 && options.abort && options.abort(options.abort_data);
}

enum class RunStatus { ok, aborted, failed, not_here };  // not_here: no kernel of ours can, and no device did

// Runs it. On failure `error` (at least 512 bytes) holds one sentence: ids out of range, or damaged weights.
RunStatus run_expert_matmul(const ExpertMatmul & op, const RunOptions & options, Workspace & work, char * error);

// What ran since the process started; for reports and for tests that must not pass on another path.
struct Counters {
    uint64_t n_layers;        // whole blocks
    uint64_t n_matmuls;       // single expert projections
    uint64_t n_rows;          // token rows x experts
    uint64_t weight_bytes;    // bytes of the experts that were read, each matmul counted once per active expert
    uint64_t n_dot_experts;   // experts served by the dot kernel
    uint64_t n_gemm_experts;  // experts served by the gemm kernel
};
Counters counters();
void count_layer();
void count_matmul(const ExpertWeights & w, int64_t n_rows, const Routing & route);

// Rows [row0, row1) of one expert, by the kernel that suits the number of token rows.
void multiply(const Kernels & kernels, const ExpertWeights & w, int64_t i_expert, int64_t row0, int64_t row1,
              const TokenRows & rows, float * scratch);

// Writes the sentence for a pair whose id is out of range (at least 512 bytes).
void describe_bad_id(const ExpertWeights & w, const ExpertIds & ids, Pair bad, char * error);

// Readies the active experts of `w` on the team. Null, or what is wrong with one of them.
const char * make_experts_ready(const ExpertWeights & w, const Routing & route, const RunOptions & options);

}  // namespace hybrid_moe
