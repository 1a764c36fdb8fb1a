// What happened when, for people: spans of time in lanes, written as a Chrome trace (Perfetto opens it) to the file that
// HYBRID_MOE_TRACE names, and kept in memory for who asks (recorder.h). Costs a comparison when both are off.
//
// Spans of devices are seen from the host: a copy begins when it is queued or when the one before it ended, whichever is
// later, and ends when its fence was seen to pass.
#pragma once

#include <cstdint>
#include <string>

namespace hybrid_moe {

// Nanoseconds on the monotonic clock.
int64_t now_ns();

// Opens the file; returns a sentence when it cannot be written, else "".
std::string open_trace(const char * path);

// One span. `process`: "CUDA0", "CPU"; `lane`: "upload", "compute"; `layer`: its weights' name; expert < 0: none.
void trace_span(const std::string & process, const char * lane, const char * name, int64_t begin_ns, int64_t end_ns,
                const std::string & layer, int64_t i_expert, int64_t n_rows, uint64_t n_bytes);

// A whole layer, or an operation of one, whoever computed it; `layer`: its weights' name. Ask first whether it is wanted.
bool traces_layer(int64_t n_tokens);
void trace_layer(int64_t begin_ns, const char * layer, int64_t n_tokens);

}  // namespace hybrid_moe
