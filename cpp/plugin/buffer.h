// Our buffer type: host memory in ggml's standard layout, so that stock code can read it, plus what we know of the
// expert tensors in it. No arithmetic.
#pragma once

#include "moe/expert_tensor.h"
#include "plugin/host.h"

namespace hybrid_moe {

ggml_backend_buffer_type_t buffer_type();

// A buffer over memory that the host owns (its own mapping of a GGUF file).
ggml_backend_buffer_t buffer_from_host_ptr(void * ptr, size_t size);

// The experts of a weight tensor that lies in one of our buffers and was declared by an ExpertTable, else null.
ExpertTensor * experts_behind(const ggml_tensor * tensor);

// Pins the pages of a result in one of our buffers for CUDA devices, once: the host will copy it to one of them, and would
// do so through a driver's staging otherwise. Others have no way to.
void pin_result(const ggml_tensor * tensor);

bool is_our_buffer(ggml_backend_buffer_t buffer);

// ggml type -> ours; returns false for types without a kernel. I8 tensors are FP8 codes (design: FP8 in GGUF).
bool weight_type_of(ggml_type type, WeightType & out);

}  // namespace hybrid_moe
