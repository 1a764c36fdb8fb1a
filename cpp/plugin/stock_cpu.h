// The host's own CPU back end, for nodes that we took because devices compute them, and devices did not.
#pragma once

#include "plugin/host.h"

namespace hybrid_moe {

class StockCpu {
public:
    StockCpu() = default;
    ~StockCpu();
    StockCpu(const StockCpu &) = delete;
    StockCpu & operator=(const StockCpu &) = delete;

    // Nodes [first, first + n) of the graph, whose tensors all lie in host memory. `abort` may be null.
    ggml_status compute(ggml_cgraph * graph, int first, int n, int n_threads, ggml_abort_callback abort, void * abort_data);

private:
    ggml_backend_t backend_ = nullptr;
};

}  // namespace hybrid_moe
