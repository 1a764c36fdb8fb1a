// "SimExperts", a device that takes the experts of Mixture-of-Experts layers as our plug-in does, and charges the CPU stage for them
// without computing anything. One charge per layer, whole layers one after the other, whoever asks for them.
#pragma once

#include "ggml-backend-impl.h"

namespace simgpu {

constexpr const char * experts_name = "SimExperts";

ggml_backend_dev_t experts_handle();

}  // namespace simgpu
