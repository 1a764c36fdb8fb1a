// A compute instance as ggml sees it: everything asynchronous goes into its stream.
#include "copy.h"
#include "graph.h"
#include "handles.h"
#include "memory.h"
#include "plugin/host.h"
#include "stream.h"

#include <memory>

namespace simgpu {
namespace {

using SharedEvent = std::shared_ptr<Event>;

struct InstanceContext {
    Device &       device;
    ggml_backend_t cpu;  // null when nothing is computed
    Stream         stream;
};

InstanceContext & context_of(ggml_backend_t backend) { return *static_cast<InstanceContext *>(backend->context); }
SharedEvent & event_of(ggml_backend_event_t event) { return *static_cast<SharedEvent *>(event->context); }

const char * get_name(ggml_backend_t backend) { return context_of(backend).device.name.c_str(); }

void free_instance(ggml_backend_t backend) {
    InstanceContext * ctx = &context_of(backend);
    const ggml_backend_t cpu = ctx->cpu;
    delete ctx;  // finishes the stream, which uses `cpu`
    if (cpu) cpu->iface.free(cpu);
    delete backend;
}

uint64_t push_copy(Stream & stream, const Copy & copy) {
    return stream.push([copy](int64_t ready) { return do_copy(copy, ready); });
}

// A driver reads and writes pageable memory itself, within the call; only pinned memory is copied behind the caller's back.
void push_host_copy(InstanceContext & ctx, const Copy & copy) {
    const uint64_t ticket = push_copy(ctx.stream, copy);
    if (copy.kind == copy_pageable && settings().pageable_blocks) ctx.stream.wait(ticket);
}

uint8_t * bytes_at(const ggml_tensor * tensor, size_t offset) { return backing(buffer_of(tensor), tensor->data) + offset; }

void set_tensor_async(ggml_backend_t backend, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    InstanceContext & ctx = context_of(backend);
    push_host_copy(ctx, plan_upload(ctx.device, bytes_at(tensor, offset), data, size));
}

void get_tensor_async(ggml_backend_t backend, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    InstanceContext & ctx = context_of(backend);
    push_host_copy(ctx, plan_download(ctx.device, data, bytes_at(tensor, offset), size));
}

bool is_instance(ggml_backend_t backend) { return backend && backend->iface.free == free_instance; }

// In the source's stream; the target's stream waits for it. Copies from or to the host are left to ggml's own fallback.
bool cpy_tensor_async(ggml_backend_t from, ggml_backend_t to, const ggml_tensor * src, ggml_tensor * dst) {
    const ggml_backend_buffer_t src_buffer = buffer_of(src);
    const ggml_backend_buffer_t dst_buffer = buffer_of(dst);
    if (!is_instance(from) || !is_instance(to) || !is_device_buffer(src_buffer) || !is_device_buffer(dst_buffer)) return false;
    Stream & stream = context_of(from).stream;
    push_copy(stream, plan_between(device_of(src_buffer), bytes_at(src, 0), device_of(dst_buffer), bytes_at(dst, 0),
                                   hybrid_moe::host().ggml_nbytes(src)));
    if (from != to) {
        const auto copied = std::make_shared<Event>();
        Event::record(copied, stream);
        Event::wait(copied, context_of(to).stream);
    }
    return true;
}

void synchronize(ggml_backend_t backend) { context_of(backend).stream.synchronize(); }

ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph * cgraph) {
    InstanceContext & ctx = context_of(backend);
    if (ctx.device.lost) return GGML_STATUS_FAILED;
    if (ctx.device.has_error.exchange(false)) {
        complain(ctx.device, "an earlier asynchronous operation failed, so this graph is refused");
        return GGML_STATUS_FAILED;
    }
    const auto graph = std::make_shared<Graph>();
    if (!graph->take(ctx.device, cgraph)) return GGML_STATUS_FAILED;
    ctx.stream.push([&ctx, graph](int64_t ready) { return run_graph(ctx.device, ctx.cpu, *graph, ready); });
    return GGML_STATUS_SUCCESS;
}

void event_record(ggml_backend_t backend, ggml_backend_event_t event) {
    Event::record(event_of(event), context_of(backend).stream);
}

void event_wait(ggml_backend_t backend, ggml_backend_event_t event) {
    Event::wait(event_of(event), context_of(backend).stream);
}

const ggml_backend_i instance_interface = {
    .get_name            = get_name,
    .free                = free_instance,
    .set_tensor_async    = set_tensor_async,
    .get_tensor_async    = get_tensor_async,
    .set_tensor_2d_async = nullptr,
    .get_tensor_2d_async = nullptr,
    .cpy_tensor_async    = cpy_tensor_async,
    .synchronize         = synchronize,
    .graph_plan_create   = nullptr,
    .graph_plan_free     = nullptr,
    .graph_plan_update   = nullptr,
    .graph_plan_compute  = nullptr,
    .graph_compute       = graph_compute,
    .event_record        = event_record,
    .event_wait          = event_wait,
    .graph_optimize      = nullptr,
};

// Random, ours: ggml compares these to tell back ends apart.
ggml_guid guid = {0xc1, 0x5f, 0x08, 0x9a, 0x3d, 0x77, 0x41, 0xe6, 0x92, 0x1b, 0x60, 0xd4, 0x2e, 0xf3, 0x8c, 0x55};

ggml_backend_t new_cpu() {
    const ggml_backend_dev_t dev = cpu_handle();
    const ggml_backend_t cpu = dev->iface.init_backend(dev, nullptr);
    void * set = cpu ? dev->reg->iface.get_proc_address(dev->reg, "ggml_backend_set_n_threads") : nullptr;
    if (set) reinterpret_cast<ggml_backend_set_n_threads_t>(set)(cpu, int(settings().n_threads));
    return cpu;
}

}  // namespace

ggml_backend_t new_instance(ggml_backend_dev_t handle) {
    Device & device = device_behind(handle);
    if (device.lost) {
        complain(device, "lost: it gives no more instances");
        return nullptr;
    }
    ggml_backend_t cpu = nullptr;
    if (settings().computes && !(cpu = new_cpu())) {
        complain(device, "the host's CPU back end gives no instance to compute with");
        return nullptr;
    }
    return new ggml_backend{&guid, instance_interface, handle, new InstanceContext{device, cpu, {}}};
}

ggml_backend_event_t new_event(ggml_backend_dev_t handle) {
    return new ggml_backend_event{handle, new SharedEvent(std::make_shared<Event>())};
}

void free_event(ggml_backend_dev_t, ggml_backend_event_t event) {
    delete &event_of(event);
    delete event;
}

void synchronize_event(ggml_backend_dev_t, ggml_backend_event_t event) { event_of(event)->synchronize(); }

}  // namespace simgpu
