// From ggml's graph nodes to the model's words: every check of shapes, types and strides is here.
#pragma once

#include "moe/expert_matmul.h"
#include "plugin/host.h"

namespace hybrid_moe {

// Whether a node is ours. During loading and scheduling a weight may have no buffer yet, or an empty one: then op,
// type and shape decide.
bool takes_op(const ggml_tensor * op);

// Parameter i of an operation, as the float that it holds.
float param_f32(const ggml_tensor * t, int i);

// The experts of a weight tensor whose type is ours.
ExpertWeights weights_of(const ggml_tensor * tensor);

// Fills `out` from a MUL_MAT_ID node whose tensors are allocated. Returns null, or what is wrong with it.
const char * describe_matmul(const ggml_tensor * node, ExpertMatmul & out);

}  // namespace hybrid_moe
