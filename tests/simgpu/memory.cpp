// Device buffers have two mappings: addresses that fault, and the bytes behind them.
#include "memory.h"

#include "copy.h"
#include "plugin/host.h"

#include <sys/mman.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>

namespace simgpu {
namespace {

constexpr size_t alignment = 128;

struct BufferContext {
    Device *  device    = nullptr;
    uint8_t * addresses = nullptr;  // [size], no access
    uint8_t * bytes     = nullptr;  // [size]
    size_t    size      = 0;
};

BufferContext & context_of(ggml_backend_buffer_t buffer) { return *static_cast<BufferContext *>(buffer->context); }

void free_buffer(ggml_backend_buffer_t buffer) {
    BufferContext * ctx = &context_of(buffer);
    munmap(ctx->addresses, ctx->size);
    munmap(ctx->bytes, ctx->size);
    ctx->device->memory.give_back(ctx->size);
    delete ctx;
}

void * get_base(ggml_backend_buffer_t buffer) { return context_of(buffer).addresses; }

const uint8_t * at(const void * p, size_t offset) { return static_cast<const uint8_t *>(p) + offset; }

void memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    uint8_t * target = backing(buffer, tensor->data) + offset;
    fill_now(*context_of(buffer).device, size, [=] { memset(target, value, size); });
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    copy_now(plan_upload(*context_of(buffer).device, backing(buffer, at(tensor->data, offset)), data, size));
}

// A router that is only timed chooses nothing, but hosts look at what it chose: in place of the bytes of an ARGSORT come
// choices that make sense, all experts in turn. Others keep the target's bytes.
void make_up_choices(const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    const ggml_tensor * sorted = tensor->view_src ? tensor->view_src : tensor;
    if (tensor->type != GGML_TYPE_I32 || sorted->op != GGML_OP_ARGSORT || offset != 0) return;
    const int64_t n_expert = sorted->ne[0];
    for (int64_t t = 0; t < tensor->ne[1]; t++) {
        for (int64_t i = 0; i < tensor->ne[0]; i++) {
            const size_t at = size_t(t) * tensor->nb[1] + size_t(i) * tensor->nb[0];
            const int32_t expert = int32_t((t * tensor->ne[0] + i) % n_expert);
            if (at + sizeof expert <= size) memcpy(static_cast<uint8_t *>(data) + at, &expert, sizeof expert);
        }
    }
}

void get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    if (!settings().moves_bytes) make_up_choices(tensor, data, offset, size);
    copy_now(plan_download(*context_of(buffer).device, data, backing(buffer, at(tensor->data, offset)), size));
}

bool cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst) {
    const ggml_backend_buffer_t from = buffer_of(src);
    if (!is_device_buffer(from)) return false;  // ggml then goes through set_tensor and get_tensor
    copy_now(plan_between(device_of(from), backing(from, src->data), *context_of(buffer).device, backing(buffer, dst->data),
                          hybrid_moe::host().ggml_nbytes(src)));
    return true;
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    const BufferContext ctx = context_of(buffer);
    fill_now(*ctx.device, ctx.size, [=] {
        if (value == 0) madvise(ctx.bytes, ctx.size, MADV_DONTNEED);  // fresh pages are zero, and cost nothing until used
        else memset(ctx.bytes, value, ctx.size);
    });
}

const ggml_backend_buffer_i buffer_interface = {
    .free_buffer   = free_buffer,
    .get_base      = get_base,
    .init_tensor   = nullptr,
    .memset_tensor = memset_tensor,
    .set_tensor    = set_tensor,
    .get_tensor    = get_tensor,
    .set_tensor_2d = nullptr,
    .get_tensor_2d = nullptr,
    .cpy_tensor    = cpy_tensor,
    .clear         = clear,
    .reset         = nullptr,
};

// Null when the allocation is to fail, with the reason in the host's log.
ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    Device & device = *static_cast<Device *>(buft->context);
    const int64_t i_call = ++device.n_allocs;
    if (device.lost || device.settings.fail_alloc.hits(i_call)) {
        complain(device, "allocation " + std::to_string(i_call) + " fails, as the faults have it");
        return nullptr;
    }
    if (!device.memory.take(size)) {
        complain(device, std::to_string(size) + " bytes do not fit: " + std::to_string(device.memory.used()) + " of " +
                             std::to_string(device.memory.total()) + " are in use (SIMGPU_MEMORY_MIB)");
        return nullptr;
    }
    auto ctx = std::make_unique<BufferContext>();
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void * addresses = mmap(nullptr, size, PROT_NONE, flags, -1, 0);
    void * bytes     = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (addresses == MAP_FAILED || bytes == MAP_FAILED) {
        if (addresses != MAP_FAILED) munmap(addresses, size);
        if (bytes != MAP_FAILED) munmap(bytes, size);
        device.memory.give_back(size);
        complain(device, "this host has no address space for " + std::to_string(size) + " bytes of device memory");
        return nullptr;
    }
    *ctx = {&device, static_cast<uint8_t *>(addresses), static_cast<uint8_t *>(bytes), size};
    return hybrid_moe::host().ggml_backend_buffer_init(buft, buffer_interface, ctx.release(), size);
}

const char * type_name(ggml_backend_buffer_type_t buft) { return static_cast<Device *>(buft->context)->name.c_str(); }
size_t get_alignment(ggml_backend_buffer_type_t) { return alignment; }

}  // namespace

ggml_backend_buffer_type_t device_buffer_type(Device & device, ggml_backend_dev_t handle) {
    static std::mutex mutex;
    static auto & types = *new std::map<const Device *, ggml_backend_buffer_type>;
    const ggml_backend_buffer_type fresh = {
        .iface   = {.get_name = type_name, .alloc_buffer = alloc_buffer, .get_alignment = get_alignment},
        .device  = handle,
        .context = &device,
    };
    const std::lock_guard lock(mutex);
    return &types.try_emplace(&device, fresh).first->second;
}

bool is_device_buffer(ggml_backend_buffer_t buffer) { return buffer && buffer->iface.free_buffer == free_buffer; }

Device & device_of(ggml_backend_buffer_t buffer) { return *context_of(buffer).device; }

ggml_backend_buffer_t buffer_of(const ggml_tensor * tensor) {
    return tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
}

uint8_t * backing(ggml_backend_buffer_t buffer, const void * device_address) {
    const BufferContext & ctx = context_of(buffer);
    return ctx.bytes + (static_cast<const uint8_t *>(device_address) - ctx.addresses);
}

}  // namespace simgpu
