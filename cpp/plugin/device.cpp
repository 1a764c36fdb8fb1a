// Device and registry vtables. What runs is decided in supports_op; how it runs is moe/'s business.
#include "plugin/device.h"

#include "plugin/buffer.h"
#include "plugin/describe.h"

#include <cstring>
#include <string>

namespace hybrid_moe {
namespace {

const char * get_name(ggml_backend_dev_t) { return device_name; }

const char * get_description(ggml_backend_dev_t) { return "Mixture-of-Experts layers on the CPU"; }

// ACCEL devices use the host's memory: nothing of our own to report.
void get_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free  = 0;
    *total = 0;
}

enum ggml_backend_dev_type get_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; }

void get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    props->name        = get_name(dev);
    props->description = get_description(dev);
    props->type        = get_type(dev);
    props->device_id   = nullptr;
    get_memory(dev, &props->memory_free, &props->memory_total);
    // Older hosts have no mmap_support: it lies in the padding of their struct.
    props->caps = {.async = false, .host_buffer = false, .buffer_from_host_ptr = true, .events = false, .mmap_support = true};
}

ggml_backend_t init_backend(ggml_backend_dev_t, const char *) { return new_backend(); }

ggml_backend_buffer_type_t get_buffer_type(ggml_backend_dev_t) { return buffer_type(); }

ggml_backend_buffer_t from_host_ptr(ggml_backend_dev_t, void * ptr, size_t size, size_t) {
    return buffer_from_host_ptr(ptr, size);
}

bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) { return takes_op(op); }

// Host memory in standard layout can be read in place, whoever allocated it.
bool supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t buft) {
    return buft == buffer_type() || (buft->iface.is_host && buft->iface.is_host(buft));
}

ggml_backend_device the_device = {
    .iface = {
        .get_name             = get_name,
        .get_description      = get_description,
        .get_memory           = get_memory,
        .get_type             = get_type,
        .get_props            = get_props,
        .init_backend         = init_backend,
        .get_buffer_type      = get_buffer_type,
        .get_host_buffer_type = nullptr,
        .buffer_from_host_ptr = from_host_ptr,
        .supports_op          = supports_op,
        .supports_buft        = supports_buft,
        .offload_op           = nullptr,
        .event_new            = nullptr,
        .event_free           = nullptr,
        .event_synchronize    = nullptr,
    },
    .reg     = nullptr,
    .context = nullptr,
};

const char * reg_name(ggml_backend_reg_t) { return device_name; }
size_t device_count(ggml_backend_reg_t) { return 1; }
ggml_backend_dev_t get_device(ggml_backend_reg_t, size_t) { return device(); }

void * get_proc_address(ggml_backend_reg_t, const char * name) {
    if (!strcmp(name, "ggml_backend_set_n_threads")) return reinterpret_cast<void *>(set_n_threads);
    if (!strcmp(name, "ggml_backend_set_abort_callback")) return reinterpret_cast<void *>(set_abort_callback);
    return nullptr;
}

}  // namespace

ggml_backend_dev_t device() {
    the_device.reg = registry();
    return &the_device;
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

}  // namespace hybrid_moe
