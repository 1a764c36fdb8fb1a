// Gpu, GpuMemory, HostMemory, Instance, Fence.
#include "stream/gpu.h"

#include <atomic>

namespace hybrid_moe {
namespace {

std::atomic<uint64_t> freed{0};

}  // namespace

bool Gpu::supports(const ggml_tensor * op) const { return host().ggml_backend_dev_supports_op(device, op); }

void Gpu::memory(size_t & n_free, size_t & n_total) const { host().ggml_backend_dev_memory(device, &n_free, &n_total); }

std::vector<Gpu> find_gpus() {
    std::vector<Gpu> gpus;
    if (missing_for_streaming()) return gpus;
    const Host & h = host();
    for (size_t i = 0; i < h.ggml_backend_dev_count(); i++) {
        Gpu gpu;
        gpu.device = h.ggml_backend_dev_get(i);
        if (h.ggml_backend_dev_type(gpu.device) != GGML_BACKEND_DEVICE_TYPE_GPU) continue;
        ggml_backend_dev_props props = {};
        h.ggml_backend_dev_get_props(gpu.device, &props);
        gpu.name        = h.ggml_backend_dev_name(gpu.device);
        gpu.description = h.ggml_backend_dev_description(gpu.device);
        gpu.family      = h.ggml_backend_reg_name(h.ggml_backend_dev_backend_reg(gpu.device));
        gpu.id          = props.device_id ? props.device_id : "";
        gpu.has_events  = props.caps.events;
        if (!props.caps.async || gpu.family == "RPC") continue;
        // Some back ends want more than they say for the offsets of what a kernel reads; 256 satisfies all that we know of.
        gpu.alignment = h.ggml_backend_buft_get_alignment(h.ggml_backend_dev_buffer_type(gpu.device));
        gpu.alignment = align_up(gpu.alignment < 256 ? 256 : gpu.alignment, 256);
        gpus.push_back(std::move(gpu));
    }
    return gpus;
}

GpuMemory::GpuMemory(const Gpu & gpu, size_t n_bytes) : size_(n_bytes) {
    buffer_ = host().ggml_backend_buft_alloc_buffer(host().ggml_backend_dev_buffer_type(gpu.device), n_bytes);
    if (!buffer_) throw DeviceError(gpu.name + ": " + std::to_string(n_bytes >> 20) + " MiB of its memory cannot be had");
    base_ = static_cast<uint8_t *>(host().ggml_backend_buffer_get_base(buffer_));
}

GpuMemory::~GpuMemory() {
    host().ggml_backend_buffer_free(buffer_);
    freed.fetch_add(1);
}

uint64_t GpuMemory::n_freed() { return freed.load(); }

void GpuMemory::place(ggml_tensor * tensor, size_t offset) const {
    tensor->buffer = nullptr;  // it may have been elsewhere before
    tensor->data   = nullptr;
    if (host().ggml_backend_tensor_alloc(buffer_, tensor, base_ + offset) != GGML_STATUS_SUCCESS) {
        throw DeviceError("a tensor cannot be placed in device memory");
    }
}

void GpuMemory::pretend(ggml_tensor * tensor) const {
    tensor->buffer = buffer_;
    tensor->data   = base_;
}

void GpuMemory::zero(ggml_tensor * tensor) const {
    if (!buffer_->iface.memset_tensor) throw DeviceError("the device's back end cannot fill memory");  // ggml would end the process
    host().ggml_backend_tensor_memset(tensor, 0, 0, host().ggml_nbytes(tensor));
}

HostMemory::HostMemory(const Gpu & gpu, size_t n_bytes) {
    ggml_backend_buffer_type_t type = host().ggml_backend_dev_host_buffer_type(gpu.device);
    if (type) buffer_ = host().ggml_backend_buft_alloc_buffer(type, n_bytes);
    // Some back ends answer with a buffer of the CPU's when they cannot pin.
    if (buffer_ && buffer_->buft != type) {
        host().ggml_backend_buffer_free(buffer_);
        buffer_ = nullptr;
    }
    if (!buffer_) plain_.reset(new uint8_t[n_bytes]);
    data_ = buffer_ ? static_cast<uint8_t *>(host().ggml_backend_buffer_get_base(buffer_)) : plain_.get();
}

HostMemory::~HostMemory() {
    if (buffer_) host().ggml_backend_buffer_free(buffer_);
}

Instance::Instance(const Gpu & gpu) : gpu_(&gpu), backend_(host().ggml_backend_dev_init(gpu.device, nullptr)) {
    if (!backend_) throw DeviceError(gpu.name + ": the device gives no instance of itself");
}

Instance::~Instance() { host().ggml_backend_free(backend_); }

void Instance::set(ggml_tensor * tensor, const void * data, size_t offset, size_t n_bytes) {
    if (n_bytes) host().ggml_backend_tensor_set_async(backend_, tensor, data, offset, n_bytes);
}

void Instance::get(const ggml_tensor * tensor, void * data, size_t offset, size_t n_bytes) {
    if (n_bytes) host().ggml_backend_tensor_get_async(backend_, tensor, data, offset, n_bytes);
}

void Instance::compute(ggml_cgraph * graph) {
    const ggml_status status = host().ggml_backend_graph_compute_async(backend_, graph);
    if (status != GGML_STATUS_SUCCESS) {
        throw DeviceError(gpu_->name + ": the device failed (status " + std::to_string(int(status)) + ")");
    }
}

void Instance::synchronize() { host().ggml_backend_synchronize(backend_); }

Fence::~Fence() {
    if (event_) host().ggml_backend_event_free(event_);
}

void Fence::set(Instance & instance) {
    if (!event_ && instance.gpu().has_events) event_ = host().ggml_backend_event_new(instance.gpu().device);
    if (event_) host().ggml_backend_event_record(event_, instance.backend());
    else instance.synchronize();
    is_set_ = event_ != nullptr;
}

void Fence::wait() {
    const bool was_set = is_set_;
    is_set_ = false;  // also when the device is lost and this throws
    if (was_set) host().ggml_backend_event_synchronize(event_);
}

}  // namespace hybrid_moe
