// The timing-only CPU stage: one engine for the whole process.
#pragma once

#include "engine.h"

namespace simgpu {

Engine & cpu_stage();

// Experts of which n_read are read, n_bytes each, for n_rows rows of them together. [ns]
double cpu_stage_ns(double n_read, double n_rows, double n_bytes, double bits_per_weight);

}  // namespace simgpu
