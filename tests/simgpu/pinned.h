// Host memory pinned for a device: ordinary memory that copies of this device find faster.
#pragma once

#include "ggml-backend-impl.h"
#include "sim_device.h"

namespace simgpu {

ggml_backend_buffer_type_t host_buffer_type(Device & device, ggml_backend_dev_t handle);

// Whether [p, p + n) lies in host memory that is pinned for this device (or for any, with SIMGPU_PINNED_SHARED).
bool is_pinned_for(const Device & device, const void * p, size_t n);

}  // namespace simgpu
