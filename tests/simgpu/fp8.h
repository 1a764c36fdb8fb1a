// FP8 expanded on the simulated device.
#pragma once

#include "ggml-backend-impl.h"

#include <cstdint>

// codes I8 [n_rows][k], scales float [ceil(n_rows / block_rows)][ceil(k / block_k)], out BF16 [n_rows][k], all in device
// memory. Done, and charged, when it returns. 0: the device is lost.
int simgpu_expand_fp8(const ggml_tensor * codes, const ggml_tensor * scales, ggml_tensor * out, int64_t block_rows, int64_t block_k);
