// What this machine can do at most: read bandwidth and multiply-add rate, for benchmarks to compare with.
#pragma once

#include "kernels/kernels.h"

#include <cstddef>
#include <cstdint>

namespace hybrid_moe {

// Bytes per second that n_threads together read from `bytes` of memory (several streams per thread), best of `repeats`.
double measure_read(int n_threads, size_t bytes, int repeats);

// Floating-point operations per second (a multiply-add is two) of n_threads threads, best of `repeats`.
double measure_fma(const Kernels & kernels, int n_threads, int repeats);

}  // namespace hybrid_moe
