// StockCpu.
#include "plugin/stock_cpu.h"

namespace hybrid_moe {
namespace {

template <class F> F function_of(ggml_backend_dev_t cpu, const char * name) {
    return reinterpret_cast<F>(host().ggml_backend_reg_get_proc_address(host().ggml_backend_dev_backend_reg(cpu), name));
}

}  // namespace

StockCpu::~StockCpu() {
    if (backend_) host().ggml_backend_free(backend_);
}

ggml_status StockCpu::compute(ggml_cgraph * graph, int first, int n, int n_threads, ggml_abort_callback abort, void * abort_data) {
    const Host & h = host();
    ggml_backend_dev_t cpu = h.ggml_backend_dev_by_name("CPU");
    if (!backend_ && cpu) backend_ = h.ggml_backend_dev_init(cpu, nullptr);
    if (!backend_) return GGML_STATUS_FAILED;
    if (auto set = function_of<ggml_backend_set_n_threads_t>(cpu, "ggml_backend_set_n_threads")) set(backend_, n_threads);
    if (auto set = function_of<ggml_backend_set_abort_callback_t>(cpu, "ggml_backend_set_abort_callback")) set(backend_, abort, abort_data);
    const size_t bytes = h.ggml_graph_overhead_custom(size_t(n), false) + h.ggml_tensor_overhead();
    ggml_context * ctx = h.ggml_init({bytes, nullptr, true});
    if (!ctx) return GGML_STATUS_ALLOC_FAILED;
    ggml_cgraph * part = h.ggml_new_graph_custom(ctx, size_t(n), false);
    for (int i = first; i < first + n; i++) h.ggml_graph_add_node(part, h.ggml_graph_node(graph, i));
    const ggml_status status = h.ggml_backend_graph_compute_async(backend_, part);
    h.ggml_backend_synchronize(backend_);
    h.ggml_free(ctx);
    return status;
}

}  // namespace hybrid_moe
