// Finds whole Mixture-of-Experts blocks in a graph, by operation and shape and never by name.
#pragma once

#include "moe/moe_layer.h"
#include "plugin/host.h"

namespace hybrid_moe {

// Whether nodes [first, first + n_nodes) of the graph are one whole block that begins with the MUL_MAT_ID at `first`:
//
//   MUL_MAT_ID up, MUL_MAT_ID gate (in any order), or one merged MUL_MAT_ID and two VIEWs; each with a scale per expert
//   (expert_scale.h) or without, and with an ADD_ID or without; an activation (GLU, UNARY, SQR, or a clamped product);
//   MUL_MAT_ID down, scale or not, ADD_ID or not; MUL by the weights or not;
//   n_used VIEWs and n_used - 1 ADDs, or one VIEW and a CONT.
//
// and nothing else. Fills `layer` and returns n_nodes, or returns 0.
int recognise_layer(ggml_cgraph * graph, int first, MoeLayer & layer);

}  // namespace hybrid_moe
