// Finds the FP8 scales of an I8 tensor in a host that knows nothing of them: in the file behind the mapping that the
// tensor lies in, or in the files that are open while the host loads (design: FP8, trailer lookup).
#pragma once

#include "moe/expert_tensor.h"

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace hybrid_moe {

// What the host maps: judged when it hands us the mapping, because with mmap llama.cpp ignores what init_tensor returns.
// Throws std::runtime_error when `ptr` lies in a GGUF file with FP8 experts whose trailer is missing, damaged or of other
// tensors. Returns something to keep while its tensors are created: the trailer is then read once.
std::shared_ptr<const void> check_mapped_model(const void * ptr);

// An ExpertTensor for a tensor of codes at `data`. Inside a file mapping the file is certain; elsewhere every open file
// whose trailer has that name and shape is a candidate, and the tensor's bytes decide at first use. Throws
// std::runtime_error when there is none.
std::unique_ptr<ExpertTensor> find_scales(const std::string & name, const ExpertTensor::Shape & shape, const uint8_t * data);

}  // namespace hybrid_moe
