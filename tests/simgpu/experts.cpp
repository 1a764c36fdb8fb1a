// Host memory that holds nothing, ops that stem from expert products, and their price.
#include "experts.h"

#include "clock.h"
#include "cpu_stage.h"
#include "handles.h"
#include "plugin/host.h"
#include "settings.h"

#include <sys/mman.h>

#include <cmath>

namespace simgpu {
namespace {

const char * get_name(ggml_backend_dev_t) { return experts_name; }
const char * type_name(ggml_backend_buffer_type_t) { return experts_name; }
const char * instance_name(ggml_backend_t) { return experts_name; }
const char * get_description(ggml_backend_dev_t) { return "simulated CPU stage for experts"; }
enum ggml_backend_dev_type get_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; }

void get_memory(ggml_backend_dev_t, size_t * free, size_t * total) { *free = *total = 0; }

void get_props(ggml_backend_dev_t, ggml_backend_dev_props * props) {
    *props = {};
    props->name        = experts_name;
    props->description = get_description(nullptr);
    props->type        = GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

// --- buffers: pages that nobody writes cost nothing

struct Pages {
    void * base;
    size_t size;
};

Pages & pages_of(ggml_backend_buffer_t buffer) { return *static_cast<Pages *>(buffer->context); }

void free_buffer(ggml_backend_buffer_t buffer) {
    munmap(pages_of(buffer).base, pages_of(buffer).size);
    delete &pages_of(buffer);
}

void * get_base(ggml_backend_buffer_t buffer) { return pages_of(buffer).base; }
void memset_tensor(ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t) {}
void set_tensor(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t) {}
void get_tensor(ggml_backend_buffer_t, const ggml_tensor *, void *, size_t, size_t) {}
void clear(ggml_backend_buffer_t, uint8_t) {}

const ggml_backend_buffer_i buffer_interface = {
    .free_buffer   = free_buffer,
    .get_base      = get_base,
    .init_tensor   = nullptr,
    .memset_tensor = memset_tensor,
    .set_tensor    = set_tensor,
    .get_tensor    = get_tensor,
    .set_tensor_2d = nullptr,
    .get_tensor_2d = nullptr,
    .cpy_tensor    = nullptr,
    .clear         = clear,
    .reset         = nullptr,
};

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    const size_t n = size ? size : 1;
    void * base = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return nullptr;
    return hybrid_moe::host().ggml_backend_buffer_init(buft, buffer_interface, new Pages{base, n}, size);
}

size_t get_alignment(ggml_backend_buffer_type_t) { return 64; }
bool is_host(ggml_backend_buffer_type_t) { return true; }

ggml_backend_buffer_type_t get_buffer_type(ggml_backend_dev_t dev) {
    static ggml_backend_buffer_type type = {
        .iface   = {.get_name = type_name, .alloc_buffer = alloc_buffer, .get_alignment = get_alignment, .get_max_size = nullptr,
                    .get_alloc_size = nullptr, .is_host = is_host},
        .device  = dev,
        .context = nullptr,
    };
    return &type;
}

// --- which ops: the layer from its first product to the weighted sum

bool is_here(const ggml_tensor * weights) {
    const ggml_backend_buffer_t buffer = weights->view_src ? weights->view_src->buffer : weights->buffer;
    return buffer && buffer->buft->iface.get_name == type_name;
}

bool stems_from_experts(const ggml_tensor * t) {
    for (; t; t = t->src[0]) {
        switch (t->op) {
            case GGML_OP_MUL_MAT_ID: return is_here(t->src[0]);
            case GGML_OP_ADD:
                if (!stems_from_experts(t->src[1])) return false;
                break;
            case GGML_OP_GLU:
                if (t->src[1] && !stems_from_experts(t->src[1])) return false;
                break;
            case GGML_OP_MUL:
                if (t->src[1]->ne[0] != 1) return false;  // a weight per row of an expert, and nothing else
                break;
            case GGML_OP_VIEW:
            case GGML_OP_ADD_ID:
            case GGML_OP_UNARY: break;
            default: return false;
        }
    }
    return false;
}

bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_NONE:
        case GGML_OP_RESHAPE:
        case GGML_OP_VIEW:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE: return true;
        default:                return stems_from_experts(op);
    }
}

bool supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t buft) {
    return buft->iface.get_name == type_name || (buft->iface.is_host && buft->iface.is_host(buft));
}

// --- what they cost

// Distinct experts that n_tokens tokens choose when every choice is as likely as any other.
double n_read(double n_expert, double n_used, double n_tokens) {
    return n_expert * (1 - std::pow(1 - n_used / n_expert, n_tokens));
}

double product_ns(const ggml_tensor * node) {
    const ggml_tensor * weights = node->src[0];  // [k, rows, n_expert]
    const ggml_tensor * ids     = node->src[2];  // [n_used, n_tokens]
    const double n_rows = double(ids->ne[0]) * double(ids->ne[1]);
    const double n_bytes = double(weights->nb[2]);
    const double bits = n_bytes * 8 / (double(weights->ne[0]) * double(weights->ne[1]));
    return cpu_stage_ns(n_read(double(weights->ne[2]), double(ids->ne[0]), double(ids->ne[1])), n_rows, n_bytes, bits);
}

ggml_status graph_compute(ggml_backend_t, ggml_cgraph * graph) {
    double ns = 0;
    for (int i = 0; i < hybrid_moe::host().ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor * node = hybrid_moe::host().ggml_graph_node(graph, i);
        if (node->op == GGML_OP_MUL_MAT_ID && (node->flags & GGML_TENSOR_FLAG_COMPUTE)) ns += product_ns(node);
    }
    if (ns > 0) {
        ask_for_sharp_timers();
        sleep_until(cpu_stage().charge(now_ns(), std::llround(ns), nullptr));
    }
    return GGML_STATUS_SUCCESS;
}

void free_instance(ggml_backend_t backend) { delete backend; }

const ggml_backend_i instance_interface = {
    .get_name            = instance_name,
    .free                = free_instance,
    .set_tensor_async    = nullptr,
    .get_tensor_async    = nullptr,
    .set_tensor_2d_async = nullptr,
    .get_tensor_2d_async = nullptr,
    .cpy_tensor_async    = nullptr,
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

ggml_guid guid = {0x21, 0x9c, 0x4e, 0x03, 0x77, 0xd8, 0x41, 0x5a, 0x8b, 0x60, 0xee, 0x12, 0x35, 0xf4, 0x09, 0xb6};

ggml_backend_t init_backend(ggml_backend_dev_t dev, const char *) {
    return new ggml_backend{&guid, instance_interface, dev, nullptr};
}

}  // namespace

ggml_backend_dev_t experts_handle() {
    static ggml_backend_device device = {
        .iface = {
            .get_name             = get_name,
            .get_description      = get_description,
            .get_memory           = get_memory,
            .get_type             = get_type,
            .get_props            = get_props,
            .init_backend         = init_backend,
            .get_buffer_type      = get_buffer_type,
            .get_host_buffer_type = nullptr,
            .buffer_from_host_ptr = nullptr,
            .supports_op          = supports_op,
            .supports_buft        = supports_buft,
            .offload_op           = nullptr,
            .event_new            = nullptr,
            .event_free           = nullptr,
            .event_synchronize    = nullptr,
        },
        .reg     = registry(),
        .context = nullptr,
    };
    return &device;
}

}  // namespace simgpu
