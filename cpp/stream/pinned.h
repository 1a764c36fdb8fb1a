// Host memory that devices copy from at full speed: pinned for them by their back end's own allocator or, for CUDA devices,
// where it lies. What cannot be pinned is staged through small pinned chunks instead (filler.h), and that is reported.
#pragma once

#include "stream/gpu.h"
#include "threads/placement.h"

#include <memory>
#include <string>
#include <vector>

namespace hybrid_moe {

// Whether memory is pinned, and for whom.
enum class Pinned { no, for_another, yes };  // for_another: for another device of the same back end, which may be as good

// Of all n bytes at `data`.
Pinned is_pinned_for(const Gpu & gpu, const void * data, size_t n_bytes);
// Up to where bytes from `data` on can be given to one copy: a driver refuses copies across the end of a registration.
size_t bytes_in_one_pin(const void * data, size_t n_bytes);

// An arena on that NUMA node, pinned for one of `gpus` (the first that can). Null when nothing can be pinned or the budget
// is used up, with the reason in `why`.
std::unique_ptr<Arena> pinned_arena(const std::vector<Gpu> & gpus, size_t n_bytes, int node, uint64_t budget, std::string & why);

// Pins memory where it lies, in whole pages inside the range; it stays pinned as long as the result lives. read_only: it is
// mapped without write permission. Null when no device of `gpus` can, with the reason in `why`.
std::shared_ptr<void> pin_in_place(const std::vector<Gpu> & gpus, const void * data, size_t n_bytes, bool read_only, uint64_t budget,
                                   std::string & why);

// Bytes that are pinned now.
uint64_t pinned_bytes();

}  // namespace hybrid_moe
