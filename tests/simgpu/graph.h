// A graph as a stream holds it: the host may reuse its own graph and tensors as soon as graph_compute has returned.
#pragma once

#include "ggml-backend-impl.h"
#include "sim_device.h"

#include <deque>
#include <unordered_map>
#include <vector>

namespace simgpu {

struct Step {
    ggml_tensor * node = nullptr;  // with addresses that the CPU can compute on; null when nothing is computed
    int64_t modelled_ns = 0;
};

class Graph {
public:
    // Counts the device's ops and lets its faults strike: false when the device is lost within this graph.
    bool take(Device & device, ggml_cgraph * graph);

    const std::vector<Step> & steps() const { return steps_; }

private:
    ggml_tensor * copy_of(const ggml_tensor * tensor);
    ggml_tensor * with_sources(const ggml_tensor * node);

    std::vector<Step> steps_;
    std::deque<ggml_tensor> tensors_;  // stable addresses
    std::unordered_map<const ggml_tensor *, ggml_tensor *> copies_;
};

// Computes and charges a graph on `device` with the CPU back end instance `cpu`; an operation of a stream.
int64_t run_graph(Device & device, ggml_backend_t cpu, const Graph & graph, int64_t ready);

}  // namespace simgpu
