// The small operations between expert projections, one graph node at a time: for blocks that recognise_layer does not
// know whole (warm-up graphs, LoRA, activations made of several nodes). Correct, not fast.
#pragma once

#include "plugin/host.h"

namespace hybrid_moe {

// Whether compute_elementwise can run the node: operation, types, strides and broadcasting.
bool is_elementwise(const ggml_tensor * node);

// Runs it on n_threads. False when an id of ADD_ID is out of range.
bool compute_elementwise(const ggml_tensor * node, int n_threads);

}  // namespace hybrid_moe
