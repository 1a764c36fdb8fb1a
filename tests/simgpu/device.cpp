// Devices and the registry as ggml sees them.
#include "experts.h"
#include "fp8.h"
#include "handles.h"
#include "memory.h"
#include "pinned.h"
#include "plugin/host.h"
#include "simgpu_api.h"

#include <cstring>
#include <map>
#include <mutex>

namespace simgpu {
namespace {

const char * get_name(ggml_backend_dev_t dev) { return device_behind(dev).name.c_str(); }

const char * get_description(ggml_backend_dev_t) { return "simulated GPU"; }

void get_memory(ggml_backend_dev_t dev, size_t * free, size_t * total) {
    const Budget & memory = device_behind(dev).memory;
    *total = memory.total();
    *free  = memory.total() - memory.used();
}

enum ggml_backend_dev_type get_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

void get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    props->name        = get_name(dev);
    props->description = get_description(dev);
    props->type        = get_type(dev);
    props->device_id   = nullptr;
    get_memory(dev, &props->memory_free, &props->memory_total);
    props->caps = {.async = true, .host_buffer = true, .buffer_from_host_ptr = false, .events = true, .mmap_support = true};
}

ggml_backend_t init_backend(ggml_backend_dev_t dev, const char *) { return new_instance(dev); }

ggml_backend_buffer_type_t get_buffer_type(ggml_backend_dev_t dev) { return device_buffer_type(device_behind(dev), dev); }

ggml_backend_buffer_type_t get_host_buffer_type(ggml_backend_dev_t dev) { return host_buffer_type(device_behind(dev), dev); }

// Integers are ids and indices to a GPU, never weights; the CPU back end's own answer does not look at that.
bool is_arithmetic(ggml_type type) {
    return type != GGML_TYPE_I8 && type != GGML_TYPE_I16 && type != GGML_TYPE_I32 && type != GGML_TYPE_I64 && type != GGML_TYPE_F64;
}

// Layouts that only the CPU's own buffer types know, such as repacked weights: copied here they would be nonsense.
bool is_foreign_layout(const ggml_tensor * t) {
    const ggml_backend_buffer_t buffer = buffer_of(t);
    if (!buffer || !buffer->buft->device) return false;
    if (buffer->buft->iface.is_host && buffer->buft->iface.is_host(buffer->buft)) return false;
    const ggml_backend_dev_t dev = buffer->buft->device;
    const auto of_host = dev->iface.get_type(dev);
    return of_host == GGML_BACKEND_DEVICE_TYPE_CPU || of_host == GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

bool supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    const double limit = device_behind(dev).settings.max_tensor_mib * (1 << 20);
    const auto is_too_large = [limit](const ggml_tensor * t) { return limit > 0 && double(hybrid_moe::host().ggml_nbytes(t)) > limit; };
    if (is_too_large(op)) return false;
    for (const ggml_tensor * source : op->src) {
        if (source && (is_foreign_layout(source) || is_too_large(source))) return false;
    }
    switch (op->op) {
        case GGML_OP_MUL_MAT:
        case GGML_OP_MUL_MAT_ID:
            if (!is_arithmetic(op->src[0]->type) || op->src[1]->type != GGML_TYPE_F32) return false;
            break;
        case GGML_OP_MAP_CUSTOM1:  // call back into the host
        case GGML_OP_MAP_CUSTOM2:
        case GGML_OP_MAP_CUSTOM3:
        case GGML_OP_CUSTOM: return false;
        default: break;
    }
    return cpu_handle()->iface.supports_op(cpu_handle(), op);
}

bool supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) { return buft == get_buffer_type(dev); }

bool offload_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    const int64_t least = device_behind(dev).settings.offload_rows;
    if (least == 0) return false;
    if (op->op == GGML_OP_MUL_MAT) return op->ne[1] >= least;
    return op->op == GGML_OP_MUL_MAT_ID && op->ne[2] >= least;
}

const ggml_backend_device_i device_interface = {
    .get_name             = get_name,
    .get_description      = get_description,
    .get_memory           = get_memory,
    .get_type             = get_type,
    .get_props            = get_props,
    .init_backend         = init_backend,
    .get_buffer_type      = get_buffer_type,
    .get_host_buffer_type = get_host_buffer_type,
    .buffer_from_host_ptr = nullptr,
    .supports_op          = supports_op,
    .supports_buft        = supports_buft,
    .offload_op           = offload_op,
    .event_new            = new_event,
    .event_free           = free_event,
    .event_synchronize    = synchronize_event,
};

const char * reg_name(ggml_backend_reg_t) { return "SimGPU"; }
size_t device_count(ggml_backend_reg_t) { return n_devices() + (settings().takes_experts ? 1 : 0); }
ggml_backend_dev_t get_device(ggml_backend_reg_t, size_t i) { return i < n_devices() ? handle_of(device_at(i)) : experts_handle(); }

void * get_proc_address(ggml_backend_reg_t, const char * name) {
    if (!strcmp(name, "simgpu_stats")) return reinterpret_cast<void *>(simgpu_stats);
    if (!strcmp(name, "simgpu_reset_stats")) return reinterpret_cast<void *>(simgpu_reset_stats);
    if (!strcmp(name, "simgpu_cpu_expert_ns")) return reinterpret_cast<void *>(simgpu_cpu_expert_ns);
    if (settings().expands_fp8 && !strcmp(name, "hybrid_moe_expand_fp8")) return reinterpret_cast<void *>(simgpu_expand_fp8);
    if (!strcmp(name, "simgpu_cpu_expert")) return reinterpret_cast<void *>(simgpu_cpu_expert);
    return nullptr;
}

}  // namespace

ggml_backend_dev_t cpu_handle() {
    static const ggml_backend_dev_t cpu = hybrid_moe::host().ggml_backend_dev_by_name("CPU");
    return cpu;
}

Device & device_behind(ggml_backend_dev_t handle) { return *static_cast<Device *>(handle->context); }

ggml_backend_dev_t handle_of(Device & device) {
    static std::mutex mutex;
    static auto & handles = *new std::map<const Device *, ggml_backend_device>;
    const std::lock_guard lock(mutex);
    return &handles.try_emplace(&device, ggml_backend_device{device_interface, registry(), &device}).first->second;
}

ggml_backend_reg_t registry() {
    static ggml_backend_reg reg = {
        .api_version = GGML_BACKEND_API_VERSION,
        .iface = {
            .get_name         = reg_name,
            .get_device_count = device_count,
            .get_device       = get_device,
            .get_proc_address = get_proc_address,
        },
        .context = nullptr,
    };
    return &reg;
}

}  // namespace simgpu
