// The two kinds of Fp8Expander.
#include "stream/fp8_expander.h"

#include "cuda/cuda_device.h"

namespace hybrid_moe {
namespace {

class CudaExpander : public Fp8Expander {
public:
    explicit CudaExpander(std::unique_ptr<CudaDevice> device) : device_(std::move(device)) {}

    bool expand(const ggml_tensor * codes, const ggml_tensor * scales, ggml_tensor * out, int64_t block_rows, int64_t block_k,
                std::string & why) override {
        const Fp8Expansion job = {codes->data, scales->data, out->data, codes->ne[1], codes->ne[0], block_rows, block_k, HalfType::bf16};
        return device_->expand_fp8(job, why);
    }
    bool wait(std::string & why) override { return device_->wait(why); }

private:
    std::unique_ptr<CudaDevice> device_;
};

class OwnExpander : public Fp8Expander {
public:
    OwnExpander(ExpandFp8 function, std::string name) : function_(function), name_(std::move(name)) {}

    bool expand(const ggml_tensor * codes, const ggml_tensor * scales, ggml_tensor * out, int64_t block_rows, int64_t block_k,
                std::string & why) override {
        if (function_(codes, scales, out, block_rows, block_k)) return true;
        why = name_ + ": the device failed to expand FP8";
        return false;
    }
    bool wait(std::string &) override { return true; }

private:
    ExpandFp8   function_;
    std::string name_;
};

}  // namespace

std::unique_ptr<Fp8Expander> find_fp8_expander(const Gpu & gpu, std::string & why) {
    ggml_backend_reg_t reg = host().ggml_backend_dev_backend_reg(gpu.device);
    if (void * own = host().ggml_backend_reg_get_proc_address(reg, fp8_expander_name)) {
        return std::make_unique<OwnExpander>(reinterpret_cast<ExpandFp8>(own), gpu.name);
    }
    if (gpu.family != "CUDA") {
        why = gpu.name + " is no CUDA device: the CPU expands FP8 to BF16, which crosses the link";
        return nullptr;
    }
    std::unique_ptr<CudaDevice> device = open_cuda_device(gpu.id.c_str(), why);
    if (device && !device->can_expand()) why = device->why_not_expand();
    if (!device || !device->can_expand()) return nullptr;
    return std::make_unique<CudaExpander>(std::move(device));
}

}  // namespace hybrid_moe
