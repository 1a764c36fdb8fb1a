// Graphs: copied with the real addresses of device memory, computed node by node by the host's own CPU back end.
#include "graph.h"

#include "cost.h"
#include "ggml-impl.h"
#include "memory.h"
#include "plugin/host.h"

#include <cmath>

namespace simgpu {
namespace {

// An instance that is this far ahead of the clock sleeps, so that others get the compute units in between; below it,
// sleeping would only add the time it takes to wake up. [ns]
constexpr int64_t worth_sleeping = 100'000;

// One node, alone: no fusion, so no use counts and no hash set are looked at.
ggml_status compute_one(ggml_backend_t cpu, ggml_tensor * node) {
    ggml_cgraph one = {};
    one.size    = 1;
    one.n_nodes = 1;
    one.nodes   = &node;
    return cpu->iface.graph_compute(cpu, &one);
}

}  // namespace

// Shallow: what an op reads of its sources is their shape and their bytes.
ggml_tensor * Graph::copy_of(const ggml_tensor * tensor) {
    ggml_tensor *& copy = copies_[tensor];
    if (copy) return copy;
    copy = &tensors_.emplace_back(*tensor);
    const ggml_backend_buffer_t buffer = buffer_of(tensor);
    if (is_device_buffer(buffer)) copy->data = backing(buffer, tensor->data);
    copy->buffer   = nullptr;
    copy->view_src = nullptr;
    copy->extra    = nullptr;
    return copy;
}

ggml_tensor * Graph::with_sources(const ggml_tensor * node) {
    ggml_tensor * copy = copy_of(node);
    for (int i = 0; i < GGML_MAX_SRC; i++) copy->src[i] = node->src[i] ? copy_of(node->src[i]) : nullptr;
    return copy;
}

bool Graph::take(Device & device, ggml_cgraph * graph) {
    const int n_nodes = hybrid_moe::host().ggml_graph_n_nodes(graph);
    for (int i = 0; i < n_nodes; i++) {
        const ggml_tensor * node = hybrid_moe::host().ggml_graph_node(graph, i);
        if (!launches(node)) continue;
        const int64_t i_op = ++device.n_ops;
        if (device.settings.lose_at.hits(i_op)) {
            lose(device);
            return false;
        }
        Step step;
        step.modelled_ns = modelled_ns(node, device.settings);
        if (device.settings.stall.n == i_op) step.modelled_ns += std::llround(device.settings.stall.ms * 1e6);
        if (settings().computes) step.node = with_sources(node);
        steps_.push_back(step);
    }
    return true;
}

int64_t run_graph(Device & device, ggml_backend_t cpu, const Graph & graph, int64_t ready) {
    for (const Step & step : graph.steps()) {
        std::function<void()> work;
        ggml_status status = GGML_STATUS_SUCCESS;
        if (step.node) work = [&] { status = compute_one(cpu, step.node); };
        ready = device.compute.charge(ready, step.modelled_ns, work);
        if (status != GGML_STATUS_SUCCESS) {
            complain(device, std::string("the CPU back end failed at '") + step.node->name + "'");
            device.has_error = true;
            return ready;
        }
        if (ready - now_ns() > worth_sleeping) sleep_until(ready);
    }
    return ready;
}

}  // namespace simgpu
