// A compute instance: walks the split that ggml gives us, node by node.
#include "plugin/buffer.h"
#include "plugin/describe.h"
#include "plugin/device.h"
#include "plugin/device_inputs.h"
#include "plugin/elementwise.h"
#include "plugin/expert_scale.h"
#include "plugin/recognise.h"
#include "plugin/settings.h"
#include "plugin/stock_cpu.h"
#include "stream/streams.h"
#include "stream/trace.h"

#include <exception>
#include <string>

namespace hybrid_moe {
namespace {

struct BackendContext {
    int                 n_threads  = 1;
    ggml_abort_callback abort      = nullptr;
    void *              abort_data = nullptr;
    Workspace           work;
    DeviceInputs        inputs;
    StreamContext       stream;
    StockCpu            stock;
};

BackendContext & context_of(ggml_backend_t backend) { return *static_cast<BackendContext *>(backend->context); }

const char * get_name(ggml_backend_t) { return device_name; }

void free_backend(ggml_backend_t backend) {
    delete &context_of(backend);
    delete backend;
}

thread_local std::string failure;

std::string name_of_node(const ggml_tensor * node) {
    const ggml_tensor * w = node->src[0];
    return std::string(host().ggml_op_name(node->op)) + " of '" + (w ? w->name : "?") + "' (" +
           (w ? host().ggml_type_name(w->type) : "?") + "): ";
}

ggml_status status_of(RunStatus status, const char * error) {
    switch (status) {
        case RunStatus::ok:      return GGML_STATUS_SUCCESS;
        case RunStatus::aborted: return GGML_STATUS_ABORTED;
        case RunStatus::failed:
        case RunStatus::not_here: break;
    }
    return report_failure(error);
}

// A span of the trace, from here to the end of the scope.
struct TracedLayer {
    const char * name;
    int64_t      n_tokens;
    int64_t      begin_ns;
    TracedLayer(const char * layer, int64_t n) : name(layer), n_tokens(n), begin_ns(traces_layer(n) ? now_ns() : 0) {}
    ~TracedLayer() {
        if (begin_ns) trace_layer(begin_ns, name, n_tokens);
    }
};

ggml_status compute_stock(BackendContext & ctx, ggml_cgraph * graph, int first, int n) {
    const ggml_status status = ctx.stock.compute(graph, first, n, ctx.n_threads, ctx.abort, ctx.abort_data);
    if (status != GGML_STATUS_FAILED) return status;
    return report_failure(name_of_node(host().ggml_graph_node(graph, first)) + "the host's CPU back end failed");
}

ggml_status compute_matmul(BackendContext & ctx, const RunOptions & options, ggml_cgraph * graph, int i) {
    const ggml_tensor * node = host().ggml_graph_node(graph, i);
    ExpertMatmul op;
    if (const char * why = describe_matmul(node, op)) return report_failure(name_of_node(node) + why);
    const TracedLayer traced(op.experts.name, op.ids.n_tokens);
    if (op.experts.shape.type == WeightType::foreign) return compute_stock(ctx, graph, i, 1);
    char error[512];
    return status_of(run_expert_matmul(op, options, ctx.work, error), error);
}

// Nodes [first, first + n), which are the layer: on the devices that stream, where that is faster, else on the CPU.
ggml_status compute_layer(BackendContext & ctx, ggml_cgraph * graph, int first, int n, const MoeLayer & layer, const RunOptions & options) {
    char error[512];
    const TracedLayer traced(layer.up.weights.name, layer.ids.n_tokens);
    if (!Streams::get().may_stream(layer.ids.n_tokens)) {
        ctx.inputs.all_to_host();
        return status_of(run_moe_layer(layer, options, ctx.work, error), error);
    }
    const int64_t row_bytes = layer.up.weights.shape.k * int64_t(sizeof(float));
    const bool is_plain = layer.n_x_slots == 1 && layer.x_token_stride == row_bytes;
    const DeviceInput * x = is_plain ? ctx.inputs.find(layer.x, layer.ids.n_tokens, row_bytes) : nullptr;
    if (!x) ctx.inputs.all_to_host();
    const RunStatus status = Streams::get().run(layer, options, ctx.work, ctx.stream, x, error);
    if (status == RunStatus::ok) pin_result(host().ggml_graph_node(graph, first + n - 1));
    ggml_status result;
    if (status == RunStatus::not_here) {
        const int64_t begin = now_ns();
        result = compute_stock(ctx, graph, first, n);
        Streams::get().learn_cpu(layer, double(now_ns() - begin) * 1e-9);
    } else {
        result = status_of(status, error);
    }
    // ggml gives an input's memory to what comes after its last reader: an input that y overlaps must not come to the host now.
    ctx.inputs.forget(layer.y, (layer.ids.n_tokens - 1) * layer.y_token_stride + layer.n_embd() * int64_t(sizeof(float)));
    return result;
}

// Computes the node at i, or the whole block that begins there; moves i behind it.
ggml_status compute_next(BackendContext & ctx, ggml_cgraph * graph, int & i) {
    const ggml_tensor * node = host().ggml_graph_node(graph, i);
    const RunOptions options = {settings().kernels, ctx.n_threads, ctx.abort, ctx.abort_data};
    if (!(node->flags & GGML_TENSOR_FLAG_COMPUTE)) {
        i++;
        return GGML_STATUS_SUCCESS;
    }
    if (node->op == GGML_OP_MUL_MAT_ID) {
        MoeLayer layer;
        if (const int n_nodes = recognise_layer(graph, i, layer)) {
            i += n_nodes;
            return compute_layer(ctx, graph, i - n_nodes, n_nodes, layer, options);
        }
        ctx.inputs.all_to_host();
        return compute_matmul(ctx, options, graph, i++);
    }
    i++;
    const bool is_scale = is_expert_scale(node);
    if (!is_scale && !is_elementwise(node)) return GGML_STATUS_SUCCESS;  // a view: nothing is read
    ctx.inputs.all_to_host();
    const bool ok = is_scale ? compute_expert_scale(node) : compute_elementwise(node, options.n_threads);
    if (!ok) {
        return report_failure(std::string(host().ggml_op_name(node->op)) + " '" + node->name + "': an expert number is out of range");
    }
    return GGML_STATUS_SUCCESS;
}

ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    BackendContext & ctx = context_of(backend);
    struct Clear {
        DeviceInputs & inputs;
        ~Clear() { inputs.clear(); }
    } const at_the_end{ctx.inputs};
    try {
        const int n_nodes = host().ggml_graph_n_nodes(graph);
        ggml_status status = GGML_STATUS_SUCCESS;
        for (int i = 0; i < n_nodes && status == GGML_STATUS_SUCCESS;) status = compute_next(ctx, graph, i);
        return status;
    } catch (const std::exception & e) {  // memory for a larger batch than ever before
        host().log(GGML_LOG_LEVEL_ERROR, "hybrid-moe: %s\n", e.what());
        return GGML_STATUS_ALLOC_FAILED;
    }
}

bool cpy_tensor_async(ggml_backend_t from, ggml_backend_t to, const ggml_tensor * src, ggml_tensor * dst) {
    return to->iface.graph_compute == graph_compute && context_of(to).inputs.keep(from, src, dst);
}

const ggml_backend_i backend_interface = {
    .get_name            = get_name,
    .free                = free_backend,
    .set_tensor_async    = nullptr,
    .get_tensor_async    = nullptr,
    .set_tensor_2d_async = nullptr,
    .get_tensor_2d_async = nullptr,
    .cpy_tensor_async    = cpy_tensor_async,
    .synchronize         = nullptr,
    .graph_plan_create   = nullptr,
    .graph_plan_free     = nullptr,
    .graph_plan_update   = nullptr,
    .graph_plan_compute  = nullptr,
    .graph_compute       = graph_compute,
    .event_record        = nullptr,
    .event_wait          = nullptr,
    .graph_optimize      = nullptr,
};

// Random, ours: ggml compares these to tell back ends apart.
ggml_guid guid = {0x6b, 0x1e, 0xd2, 0x47, 0x90, 0x3c, 0x4f, 0x0a, 0xa7, 0x55, 0x18, 0xe9, 0xcc, 0x02, 0x7d, 0x31};

}  // namespace

ggml_status report_failure(const std::string & sentence) {
    failure = sentence;
    host().log(GGML_LOG_LEVEL_ERROR, "hybrid-moe: %s\n", sentence.c_str());
    return GGML_STATUS_FAILED;
}

std::string take_failure() {
    std::string sentence;
    sentence.swap(failure);
    return sentence;
}

ggml_backend_t new_backend() {
    auto * ctx = new BackendContext;
    ctx->n_threads = settings().default_threads;
    return new ggml_backend{&guid, backend_interface, device(), ctx};
}

void set_n_threads(ggml_backend_t backend, int n_threads) {
    context_of(backend).n_threads = n_threads < 1 ? 1 : n_threads;
}

void set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void * data) {
    context_of(backend).abort      = callback;
    context_of(backend).abort_data = data;
}

}  // namespace hybrid_moe
