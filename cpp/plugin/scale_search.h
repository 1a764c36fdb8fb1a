// Finds the FP8 scales of an I8 tensor in a host that knows nothing of them: in the file behind the mapping that the
// tensor lies in, or in the files that are open while the host loads (design: FP8, trailer lookup).
#pragma once

#include "moe/expert_tensor.h"

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace hybrid_moe {

// What the host maps: judged when it hands us the mapping, so that a damaged file stops the load. Throws
// std::runtime_error when [ptr, ptr + size) lies in a file that is marked as FP8 (KV hybrid_moe.fp8.version) and whose
// trailer is missing or damaged.
void check_mapped_model(const void * ptr, size_t size);

// An ExpertTensor for a tensor of codes at `data`. Inside a file mapping the file is certain; elsewhere every open file
// whose trailer has that name and shape is a candidate, and the tensor's bytes decide at first use. Throws
// std::runtime_error when there is none.
std::unique_ptr<ExpertTensor> find_scales(const std::string & name, const ExpertTensor::Shape & shape, const uint8_t * data);

}  // namespace hybrid_moe
