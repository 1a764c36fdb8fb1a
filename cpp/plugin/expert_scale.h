// One float per expert that multiplies a projection's output. llama.cpp makes four nodes of it:
//
//   RESHAPE scale to [1, n_expert], REPEAT it for every token, GET_ROWS by the expert numbers, MUL
//
// REPEAT and GET_ROWS would go to another back end, and cut the block in pieces, if they were not recognised here.
#pragma once

#include "moe/moe_layer.h"
#include "plugin/host.h"

namespace hybrid_moe {

// Whether a node is such a REPEAT or GET_ROWS, by operation, types and shapes.
bool is_expert_scale(const ggml_tensor * node);

// Runs one by itself. False when an expert number is out of range.
bool compute_expert_scale(const ggml_tensor * node);

// Whether `mul` is such a MUL, of experts chosen by `ids` out of n_expert. Fills `scale`.
bool find_expert_scale(const ggml_tensor * mul, const ggml_tensor * ids, int64_t n_expert, ExpertScale & scale);

}  // namespace hybrid_moe
