// A GPU device of the host, through ggml's generic interface alone: memory, instances and fences. CUDA, Vulkan, HIP, SYCL
// and Metal devices look alike from here. Knows no experts.
//
// An instance is driven by one thread at a time, and that thread also waits for its fences: back ends differ in what else
// they allow.
#pragma once

#include "plugin/host.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace hybrid_moe {

// The device did not do what it was asked to. One sentence.
struct DeviceError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// What a host has. Devices live as long as the process.
struct Gpu {
    ggml_backend_dev_t device = nullptr;
    std::string        name;         // "CUDA0"
    std::string        description;  // "NVIDIA GeForce RTX 5090"
    std::string        family;       // of its back end: "CUDA"
    std::string        id;           // PCI bus, where the back end says it
    size_t             alignment  = 0;
    bool               has_events = false;

    bool supports(const ggml_tensor * op) const;
    void memory(size_t & n_free, size_t & n_total) const;
};

// All devices of type GPU (integrated ones share the host's memory: there is nothing to stream), except those whose back end
// copies only while the caller waits, which would hide nothing, and those of other machines (RPC).
std::vector<Gpu> find_gpus();

// Device memory. Tensors are placed in it by hand, so that nothing is allocated between layers.
class GpuMemory {
public:
    // Throws DeviceError when the device has no room.
    GpuMemory(const Gpu & gpu, size_t n_bytes);
    ~GpuMemory();
    GpuMemory(const GpuMemory &) = delete;
    GpuMemory & operator=(const GpuMemory &) = delete;

    // How many have been freed so far. An instance must not be used after memory that it has computed with is gone: back ends keep
    // bindings, and some drivers (lavapipe of Mesa 22) look at those too that a kernel does not use.
    static uint64_t n_freed();

    size_t size() const { return size_; }
    uint8_t * base() const { return base_; }  // not an address of this process
    // `offset` is a multiple of the device's alignment. Back ends may write to what pads the tensor. Throws DeviceError.
    void place(ggml_tensor * tensor, size_t offset) const;
    // As if it lay here, for questions to the device about an operation: nothing is written.
    void pretend(ggml_tensor * tensor) const;
    // All of a tensor that lies here; done when it returns. Throws DeviceError: some back ends cannot.
    void zero(ggml_tensor * tensor) const;

private:
    ggml_backend_buffer_t buffer_;
    uint8_t *             base_;
    size_t                size_;
};

// Host memory that the device copies from and to at full speed, or ordinary memory where it cannot be had.
class HostMemory {
public:
    HostMemory(const Gpu & gpu, size_t n_bytes);
    ~HostMemory();
    HostMemory(const HostMemory &) = delete;
    HostMemory & operator=(const HostMemory &) = delete;

    uint8_t * data() const { return data_; }
    bool is_pinned() const { return buffer_ != nullptr; }

private:
    ggml_backend_buffer_t      buffer_ = nullptr;
    std::unique_ptr<uint8_t[]> plain_;
    uint8_t *                  data_ = nullptr;
};

class Instance {
public:
    // Throws DeviceError.
    explicit Instance(const Gpu & gpu);
    ~Instance();
    Instance(const Instance &) = delete;
    Instance & operator=(const Instance &) = delete;

    // Queued, in this order. `data` stays as it is until a fence after it has passed.
    void set(ggml_tensor * tensor, const void * data, size_t offset, size_t n_bytes);
    void get(const ggml_tensor * tensor, void * data, size_t offset, size_t n_bytes);
    void compute(ggml_cgraph * graph);  // throws DeviceError
    void synchronize();

    ggml_backend_t backend() const { return backend_; }
    const Gpu & gpu() const { return *gpu_; }

private:
    const Gpu *    gpu_;
    ggml_backend_t backend_;
};

// A point in an instance's queue. Without events on the device, setting it waits.
class Fence {
public:
    Fence() = default;
    ~Fence();
    Fence(const Fence &) = delete;
    Fence & operator=(const Fence &) = delete;

    void set(Instance & instance);
    void wait();  // returns at once when it is not set

private:
    ggml_backend_event_t event_  = nullptr;
    bool                 is_set_ = false;
};

constexpr size_t align_up(size_t n, size_t alignment) { return (n + alignment - 1) / alignment * alignment; }

}  // namespace hybrid_moe
