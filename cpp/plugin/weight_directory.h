// Which expert tensors are loaded where, by name: to guess what the layer after the first one seen is. Wrong guesses cost
// bandwidth and nothing else.
#pragma once

#include "plugin/host.h"
#include "stream/layer_experts.h"

namespace hybrid_moe {

void note_weight(const ggml_tensor * tensor);
void forget_weights(ggml_backend_buffer_t buffer);

// The tensor that has the same name with the next layer's number, in the same buffer. False when there is none.
bool weight_of_next_layer(const PartWeights & part, PartWeights & next);

}  // namespace hybrid_moe
