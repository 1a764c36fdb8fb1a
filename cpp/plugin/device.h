// The device HybridMoE as ggml sees it: what it is called and which operations it takes.
#pragma once

#include "plugin/host.h"

namespace hybrid_moe {

constexpr const char * device_name = "HybridMoE";

ggml_backend_dev_t device();
ggml_backend_reg_t registry();

// A compute instance; several may exist, each with its own thread count.
ggml_backend_t new_backend();

// Logs a sentence and keeps it for our Python package, which raises it; other hosts have the log.
ggml_status report_failure(const std::string & sentence);

// The sentence of the last load or graph of this thread that failed, once; else empty.
std::string take_failure();

void set_n_threads(ggml_backend_t backend, int n_threads);
void set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void * data);

}  // namespace hybrid_moe
