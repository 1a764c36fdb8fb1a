// The C functions that our Python package calls besides ggml's own. Every function that can fail returns a negative
// number or null and leaves a sentence in hybrid_moe_error() (per thread). Pointers are borrowed unless said otherwise.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define HYBRID_MOE_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

HYBRID_MOE_API const char * hybrid_moe_error(void);

// Why ggml_backend_init last returned null; empty when it did not.
HYBRID_MOE_API const char * hybrid_moe_refusal(void);

// Why the last load or computation of this thread failed, once; empty when none did.
HYBRID_MOE_API const char * hybrid_moe_take_failure(void);

// The kernels in use ("avx2", ...), what runs the threads ("openmp", "pool"), where they are pinned ("auto", "on", "off"), and
// the names of all kernels that run here, separated by spaces. All but the last are empty before a host has loaded us.
HYBRID_MOE_API const char * hybrid_moe_isa(void);
HYBRID_MOE_API const char * hybrid_moe_team(void);
HYBRID_MOE_API const char * hybrid_moe_pin(void);
HYBRID_MOE_API const char * hybrid_moe_available_isas(void);

// What the embedded CUDA kernels were compiled for, such as "sm_75 sm_90 compute_75"; empty when this library has none.
HYBRID_MOE_API const char * hybrid_moe_cuda_kernels(void);

// {matmuls, token rows, weight bytes, experts by dot, experts by gemm, whole layers} since the process started.
HYBRID_MOE_API void hybrid_moe_counters(uint64_t out[6]);

// What of a machine this process may use, as a JSON object (cpp/threads/topology.h). Null roots: this machine, as it was
// when the process first asked; else the files below them, with the affinity mask `cpus` ("0-3,8"). Null when that is no list.
// hybrid_moe_pretend_machine makes that one this machine, for tests, before anything has run.
HYBRID_MOE_API const char * hybrid_moe_machine(const char * sys_root, const char * proc_root, const char * cpus);
HYBRID_MOE_API int hybrid_moe_pretend_machine(const char * sys_root, const char * proc_root, const char * cpus);

// What was streamed to which device, and why not: a JSON object (cpp/stream/report.cpp).
HYBRID_MOE_API const char * hybrid_moe_stream_report(void);

// From now on, keeps in memory when layers of batches with at least so many tokens ran, and what devices did; 0: no more.
HYBRID_MOE_API void hybrid_moe_record(int64_t min_tokens);
// What was kept and touches that time (nanoseconds on CLOCK_MONOTONIC), as a JSON array of spans (cpp/stream/recorder.h): whole
// layers, or (of_layers == 0) copies and computations on devices and the CPU's share of streamed layers.
HYBRID_MOE_API const char * hybrid_moe_recorded(int of_layers, int64_t begin_ns, int64_t end_ns);
// What long batches of this process may use from now on, until the next call: of the devices that stream those in `devices`
// ("CUDA0,CUDA1", empty: none, null: all), and whether the CPU may compute a part of what is streamed; without it long batches
// stream wherever a device can. Layers that run obey: devices before their next expert, the CPU before its next layer. Cheap
// enough for every step of a decoder. -1, and nothing changes: nothing is streamed to such a device.
HYBRID_MOE_API int hybrid_moe_stream_allow(const char * devices, int cpu_may_help);
// Whether the calling thread's batches have priority: that does not bind them, and where others stream they do not wait, the
// CPU computes them.
HYBRID_MOE_API void hybrid_moe_stream_first(int is_first);
// For simulated machines: from now on `charge` is called instead of computing experts on the CPU (null: computes again). It
// returns when n_rows rows are multiplied by n_bytes of weights. Results are zeros.
HYBRID_MOE_API void hybrid_moe_pretend_cpu(int64_t (*charge)(int64_t n_rows, size_t n_bytes, double bits_per_weight));

// Expert tables: which bytes of which files stand for a tensor name. A table is used by one load at a time.
typedef struct hybrid_moe_table hybrid_moe_table;

typedef struct {
    const char *     name;         // GGUF tensor name
    int32_t          type;         // hybrid_moe::WeightType
    int64_t          n_expert, n_rows, k;
    int32_t          scale_type;   // hybrid_moe::ScaleType; FP8 only
    int64_t          block_rows, block_k;
    const int32_t *  code_file;    // [n_expert] numbers from hybrid_moe_table_add_file
    const uint64_t * code_offset;  // [n_expert]
    const int32_t *  scale_file;   // [n_expert], FP8 only
    const uint64_t * scale_offset;
} hybrid_moe_expert_tensor;

// copied != 0: the load copies the experts' bytes into the tensors; 0: they are used in the files.
HYBRID_MOE_API hybrid_moe_table * hybrid_moe_table_new(int copied);
HYBRID_MOE_API int  hybrid_moe_table_add_file(hybrid_moe_table * table, const char * path);
HYBRID_MOE_API int  hybrid_moe_table_add_tensor(hybrid_moe_table * table, const hybrid_moe_expert_tensor * tensor);
// Between these two, tensors that this thread's loads create in our buffers are looked up in the table.
HYBRID_MOE_API void hybrid_moe_load_begin(hybrid_moe_table * table);
HYBRID_MOE_API int  hybrid_moe_load_end(void);  // number of the table's tensors that were found
// Where the experts of this thread's loads are computed from: "mmap", "copy", "pinned", or null: what HYBRID_MOE_EXPERTS_MEMORY says.
HYBRID_MOE_API int  hybrid_moe_choose_experts_memory(const char * name);
// What is held in copies, per NUMA node, and what went wrong with it: a JSON object (cpp/moe/expert_copy.h). Asks the kernel
// about every page.
HYBRID_MOE_API const char * hybrid_moe_copies(void);
// The files stay mapped while a model uses them.
HYBRID_MOE_API void hybrid_moe_table_free(hybrid_moe_table * table);

// One product y[m][n_rows] = W x by one kernel of one ISA on this thread, for tests and benchmarks.
// kernel: 0 dot, 1 gemm. scales: float [grid] for FP8, else null.
typedef struct {
    int32_t         type;
    const uint8_t * codes;
    int64_t         n_rows, k;
    const float *   scales;
    int64_t         block_rows, block_k;
} hybrid_moe_matrix;
HYBRID_MOE_API int hybrid_moe_matmul(const char * isa, int kernel, const hybrid_moe_matrix * matrix, int64_t m,
                                     const float * x, float * y);
// Decodes the whole matrix to float [n_rows][k].
HYBRID_MOE_API int hybrid_moe_expand(const char * isa, const hybrid_moe_matrix * matrix, float * out);
// 1 when a code is NaN, 0 when none is.
HYBRID_MOE_API int hybrid_moe_has_nan(const char * isa, const uint8_t * codes, size_t n);
// Bytes per second and floating-point operations per second of n_threads threads: best of `repeats`.
HYBRID_MOE_API double hybrid_moe_measure_read(int n_threads, size_t bytes, int repeats);
HYBRID_MOE_API double hybrid_moe_measure_fma(int n_threads, int repeats);
// Microseconds per region of n_threads threads by `provider` ("pool", "openmp"), each thread working for work_us: out[rounds].
// Before each region the calling thread waits for gap_us, or (host_works) the host's OpenMP team works for gap_us, as in a
// host that computes attention on the same CPUs.
HYBRID_MOE_API int hybrid_moe_measure_team(const char * provider, int n_threads, double gap_us, int host_works, double work_us,
                                           int rounds, double * out);
// Empty when a host with that ggml version may load us, else the sentence it would get.
HYBRID_MOE_API const char * hybrid_moe_judge_version(const char * version);

#ifdef __cplusplus
}
#endif
