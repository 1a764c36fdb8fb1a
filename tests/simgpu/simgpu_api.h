/* What a test may ask of the simulation beyond ggml's interface. Get the functions by name from the registry "SimGPU" with
 * ggml_backend_reg_get_proc_address, or from the library itself. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SIMGPU_API __attribute__((visibility("default")))

/* All books as one JSON object (README.md has the fields). Valid until this thread asks again. */
SIMGPU_API const char * simgpu_stats(void);

/* Empties the books: times, bytes, counts of finished work. Memory in use and the counters that faults go by stay. */
SIMGPU_API void simgpu_reset_stats(void);

/* The timing-only CPU stage: what one expert costs for n_rows rows,
 * max(expert_bytes / SIMGPU_CPU_GBPS, 2 x n_rows x weights / SIMGPU_CPU_TFLOPS), weights = expert_bytes x 8 / bits_per_weight.
 * 0 for no rows; -1 when an argument makes no sense. Nothing is computed. */
SIMGPU_API int64_t simgpu_cpu_expert_ns(int64_t n_rows, size_t expert_bytes, double bits_per_weight);

/* Charges it: returns when the CPU, which does one expert at a time for all callers, has done it. The value is the same. */
SIMGPU_API int64_t simgpu_cpu_expert(int64_t n_rows, size_t expert_bytes, double bits_per_weight);

#ifdef __cplusplus
}
#endif
