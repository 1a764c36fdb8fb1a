// Brings experts, activations and vectors from host memory to one device, by the shortest way their bytes allow: directly
// from pinned memory, else through pinned chunks; FP8 codes become BF16 on the way.
#pragma once

#include "stream/expert_graph.h"
#include "stream/staging.h"

#include <optional>

namespace hybrid_moe {

class Filler {
public:
    Filler(const Gpu & gpu, int n_threads);

    // Queues the expert's matrices into a slot, in the form that its tensors have. Null, or what is wrong with the weights (a
    // sentence that lives on).
    const char * fill(Instance & to, const LayerExperts & experts, int64_t i_expert, const SlotTensors & slot,
                      const Kernels & kernels);

    // Queues rows of n_bytes, `stride` apart in memory and contiguous on the device.
    void send_rows(Instance & to, ggml_tensor * tensor, const uint8_t * rows, int64_t n_rows, size_t n_bytes, int64_t stride);
    void send(Instance & to, ggml_tensor * tensor, const void * data, size_t offset, size_t n_bytes);

    bool is_pinned() const { return staging_.is_pinned(); }
    size_t host_bytes() const { return staging_.size(); }
    uint64_t direct_bytes() const { return direct_bytes_; }
    uint64_t staged_bytes() const { return staged_bytes_; }

private:
    void send_bytes(Instance & to, const PartWeights & part, int64_t i_expert, ggml_tensor * tensor);
    void send_expanded(Instance & to, const PartWeights & part, int64_t i_expert, ggml_tensor * tensor, const Kernels & kernels);
    void send_scales(Instance & to, const PartWeights & part, int64_t i_expert, ggml_tensor * tensor);

    bool send_directly(Instance & to, ggml_tensor * tensor, const uint8_t * from, size_t offset, size_t n_bytes);
    void try_foreign(Instance & to, ggml_tensor * tensor, const uint8_t * from, size_t offset);

    const Gpu *           gpu_;
    Staging               staging_;
    Crew                  crew_;
    std::atomic<uint64_t> direct_bytes_{0}, staged_bytes_{0};
    std::optional<bool>   foreign_is_fast_;
};

}  // namespace hybrid_moe
