// For tests and simulated machines: instead of being computed on the CPU, experts are handed to a function that takes as long as
// such a machine would. Off unless somebody asks for it by the C API.
#pragma once

#include "moe/moe_layer.h"

namespace hybrid_moe {

// Returns when the CPU would have multiplied n_rows rows by weights of so many bytes and bits each; negative: it makes no sense.
using PretendCpu = int64_t (*)(int64_t n_rows, size_t n_bytes, double bits_per_weight);

void pretend_cpu(PretendCpu f);  // null: compute
PretendCpu pretended_cpu();

// run_moe_layer's work, pretended: y is all zeros.
void pretend_moe_layer(PretendCpu f, const MoeLayer & layer, const Routing & route);

}  // namespace hybrid_moe
