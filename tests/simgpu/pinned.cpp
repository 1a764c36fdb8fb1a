// The host buffer type of each device, and the list of what is pinned.
#include "pinned.h"

#include "plugin/host.h"

#include <sys/mman.h>

#include <cstring>
#include <map>
#include <shared_mutex>

namespace simgpu {
namespace {

struct Range {
    size_t   size;
    Device * device;
};

std::shared_mutex mutex;
auto & ranges = *new std::map<const uint8_t *, Range>;  // by first byte; never destroyed, see sim_device.cpp

void free_buffer(ggml_backend_buffer_t buffer) {
    const std::lock_guard lock(mutex);
    const auto found = ranges.find(static_cast<uint8_t *>(buffer->context));
    found->second.device->host_memory.give_back(found->second.size);
    munmap(buffer->context, found->second.size);
    ranges.erase(found);
}

void * get_base(ggml_backend_buffer_t buffer) { return buffer->context; }

void memset_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    memset(static_cast<uint8_t *>(tensor->data) + offset, value, size);
}

void set_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    memcpy(static_cast<uint8_t *>(tensor->data) + offset, data, size);
}

void get_tensor(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    memcpy(data, static_cast<const uint8_t *>(tensor->data) + offset, size);
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) { memset(buffer->context, value, buffer->size); }

const ggml_backend_buffer_i buffer_interface = {
    .free_buffer   = free_buffer,
    .get_base      = get_base,
    .init_tensor   = nullptr,
    .memset_tensor = memset_tensor,
    .set_tensor    = set_tensor,
    .get_tensor    = get_tensor,
    .set_tensor_2d = nullptr,
    .get_tensor_2d = nullptr,
    .cpy_tensor    = nullptr,  // never asked: ggml copies from and to host buffers with set_tensor and get_tensor
    .clear         = clear,
    .reset         = nullptr,
};

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    Device & device = *static_cast<Device *>(buft->context);
    const int64_t i_call = ++device.n_host_allocs;
    if (device.lost || device.settings.fail_host_alloc.hits(i_call)) {
        complain(device, "pinning " + std::to_string(i_call) + " fails, as the faults have it");
        return nullptr;
    }
    if (!device.host_memory.take(size)) {
        complain(device, std::to_string(size) + " bytes cannot be pinned: " + std::to_string(device.host_memory.used()) +
                             " of " + std::to_string(device.host_memory.total()) + " are (SIMGPU_HOST_MEMORY_MIB)");
        return nullptr;
    }
    void * p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        device.host_memory.give_back(size);
        complain(device, "this host has no " + std::to_string(size) + " bytes to pin");
        return nullptr;
    }
    {
        const std::lock_guard lock(mutex);
        ranges[static_cast<uint8_t *>(p)] = {size, &device};
    }
    return hybrid_moe::host().ggml_backend_buffer_init(buft, buffer_interface, p, size);
}

const char * type_name(ggml_backend_buffer_type_t buft) {
    static auto & names = *new std::map<const Device *, std::string>;
    static std::mutex names_mutex;
    const Device * device = static_cast<Device *>(buft->context);
    const std::lock_guard lock(names_mutex);
    return names.try_emplace(device, device->name + "_Host").first->second.c_str();
}

size_t get_alignment(ggml_backend_buffer_type_t) { return 64; }
bool is_host(ggml_backend_buffer_type_t) { return true; }

}  // namespace

ggml_backend_buffer_type_t host_buffer_type(Device & device, ggml_backend_dev_t handle) {
    static auto & types = *new std::map<const Device *, ggml_backend_buffer_type>;
    const ggml_backend_buffer_type fresh = {
        .iface   = {.get_name = type_name, .alloc_buffer = alloc_buffer, .get_alignment = get_alignment, .is_host = is_host},
        .device  = handle,
        .context = &device,
    };
    const std::lock_guard lock(mutex);
    return &types.try_emplace(&device, fresh).first->second;
}

bool is_pinned_for(const Device & device, const void * p, size_t n) {
    const uint8_t * begin = static_cast<const uint8_t *>(p);
    const std::shared_lock lock(mutex);
    auto found = ranges.upper_bound(begin);
    if (found == ranges.begin()) return false;
    --found;
    if (begin + n > found->first + found->second.size) return false;
    return found->second.device == &device || settings().pinned_shared;
}

}  // namespace simgpu
