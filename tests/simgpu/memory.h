// Device memory: buffers that only the tensor functions reach.
#pragma once

#include "ggml-backend-impl.h"
#include "sim_device.h"

namespace simgpu {

// `handle` is ggml's handle of the device.
ggml_backend_buffer_type_t device_buffer_type(Device & device, ggml_backend_dev_t handle);

bool is_device_buffer(ggml_backend_buffer_t buffer);
Device & device_of(ggml_backend_buffer_t buffer);  // of a device buffer

// The buffer a tensor lies in, also when the tensor is a view. May be null.
ggml_backend_buffer_t buffer_of(const ggml_tensor * tensor);

// Where the bytes really are that a device address means. Device addresses themselves are inaccessible: a host that reads
// device memory like its own gets a segmentation fault here, as with a real device.
uint8_t * backing(ggml_backend_buffer_t buffer, const void * device_address);

}  // namespace simgpu
