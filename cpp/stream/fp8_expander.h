// FP8 experts that cross the link as they are and become BF16 on the device. With our CUDA kernel, or with a function of the
// device's own back end where it has one; without, CPU threads expand them on the way (filler.cpp).
#pragma once

#include "stream/gpu.h"

#include <memory>
#include <string>

namespace hybrid_moe {

class Fp8Expander {
public:
    virtual ~Fp8Expander() = default;

    // Starts to expand: codes [n_rows][k] (I8 tensor), scales float [ceil(n_rows / block_rows)][ceil(k / block_k)], out BF16
    // [n_rows][k], all on the device, and there. False with a sentence.
    virtual bool expand(const ggml_tensor * codes, const ggml_tensor * scales, ggml_tensor * out, int64_t block_rows, int64_t block_k,
                        std::string & why) = 0;
    // Until all of it is done.
    virtual bool wait(std::string & why) = 0;
};

// What a back end's registry may offer under this name: the same, done when it returns. 0: it failed.
constexpr const char * fp8_expander_name = "hybrid_moe_expand_fp8";
using ExpandFp8 = int (*)(const ggml_tensor * codes, const ggml_tensor * scales, ggml_tensor * out, int64_t block_rows, int64_t block_k);

// Null when the device has none, with the reason.
std::unique_ptr<Fp8Expander> find_fp8_expander(const Gpu & gpu, std::string & why);

}  // namespace hybrid_moe
