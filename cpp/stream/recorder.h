// The latest spans of trace.h in memory, for who asks while the process runs: the server's page. Bounded, the oldest are
// forgotten. Costs a comparison while it is off.
#pragma once

#include <cstdint>
#include <string>

namespace hybrid_moe {

// Layers of batches with at least so many tokens, and everything that devices do; 0: off, and what there was is forgotten.
void    record_from(int64_t min_tokens);
int64_t recorded_from();

void record_span(const std::string & process, const char * lane, const char * name, int64_t begin_ns, int64_t end_ns,
                 const std::string & layer, int64_t i_expert, int64_t n_rows, uint64_t n_bytes);

// Spans that touch [begin_ns, end_ns] as a JSON array, in the order in which they ended: those of lane "layer", or all others.
std::string recorded(bool of_layers, int64_t begin_ns, int64_t end_ns);

}  // namespace hybrid_moe
