// ggml's handles of the simulated devices and their instances.
#pragma once

#include "ggml-backend-impl.h"
#include "sim_device.h"

namespace simgpu {

ggml_backend_reg_t registry();
ggml_backend_dev_t handle_of(Device & device);
Device & device_behind(ggml_backend_dev_t handle);

// A compute instance, or null when the device is lost.
ggml_backend_t new_instance(ggml_backend_dev_t handle);

ggml_backend_event_t new_event(ggml_backend_dev_t handle);
void free_event(ggml_backend_dev_t handle, ggml_backend_event_t event);
void synchronize_event(ggml_backend_dev_t handle, ggml_backend_event_t event);

// The host's CPU back end, which computes for us and says which ops it can.
ggml_backend_dev_t cpu_handle();

}  // namespace simgpu
