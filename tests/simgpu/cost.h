// What one op costs on a device: a roofline, from shapes alone.
#pragma once

#include "ggml.h"
#include "settings.h"

#include <cstdint>

namespace simgpu {

// Views, and nodes that the graph marks as not to be computed, launch nothing, cost nothing and are not counted as ops.
bool launches(const ggml_tensor * node);

double flops_of(const ggml_tensor * node);
double bytes_of(const ggml_tensor * node);

// max(flops / TFLOPs, bytes / memory GB/s) x slow + launch latency
int64_t modelled_ns(const ggml_tensor * node, const DeviceSettings & settings);

}  // namespace simgpu
