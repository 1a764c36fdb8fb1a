// Which host memory devices copy from at full speed. Ranges are added by whoever pins memory for experts.
#pragma once

#include "stream/gpu.h"

namespace hybrid_moe {

// [begin, begin + n) is pinned for that device; an empty name: for all devices of the family.
void note_pinned(const std::string & family, const std::string & device, const void * begin, size_t n_bytes);
void forget_pinned(const void * begin);

bool is_pinned_for(const Gpu & gpu, const void * data, size_t n_bytes);

}  // namespace hybrid_moe
