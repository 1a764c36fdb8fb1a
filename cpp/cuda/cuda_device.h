// What our own CUDA code offers to streaming beside ggml's device: FP8 expanded on the GPU, and host memory pinned where it
// lies. Works on ggml-cuda's context of the same GPU, so its buffers are valid here. Knows nothing of ggml.
#pragma once

#include "cuda/cuda_driver.h"
#include "cuda/fp8_expand_body.h"
#include "cuda/kernel_image.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace hybrid_moe {

// One matrix to expand; all three pointers are device memory, and `out` overlaps neither of the others. Experts whose codes
// and scales follow one another without a gap are one matrix of n_expert x n_rows rows when n_rows is a multiple of block_rows.
struct Fp8Expansion {
    const void * codes;       // [n_rows][k] E4M3FN; fastest when a multiple of 16
    const void * scales;      // float [ceil(n_rows / block_rows)][ceil(k / block_k)]
    void *       out;         // [n_rows][k] BF16 or F16; fastest when a multiple of 16
    int64_t      n_rows;
    int64_t      k;
    int64_t      block_rows;  // as in ExpertMatrix (kernels/kernels.h)
    int64_t      block_k;
    HalfType     to;
};

// Not for two threads at once. Functions that return false leave one sentence in `why`; none throws for anything the
// driver says.
class CudaDevice {
public:
    ~CudaDevice();
    CudaDevice(const CudaDevice &) = delete;
    CudaDevice & operator=(const CudaDevice &) = delete;

    const std::string & name() const { return name_; }  // such as "CUDA device 0000:01:00.0"

    // Whether expand_fp8 works here; if not, a sentence that says why. Pinning works without.
    bool can_expand() const { return why_no_kernels_.empty(); }
    const std::string & why_not_expand() const { return why_no_kernels_; }

    // Pins all pages that [begin, begin + bytes) touches, in pieces of at most 2 GiB; nothing stays pinned when it fails.
    // read_only: the memory is mapped without write permission, as model files are. Holds for all CUDA devices of the process,
    // as long as this object lives. A page can be pinned once per process: pin whole mappings, through one device.
    bool register_host(const void * begin, size_t bytes, bool read_only, std::string & why);
    // The range that began there; it is forgotten even when the driver reports an error. The memory must still be mapped, and
    // copies from it must have ended.
    bool unregister_host(const void * begin, std::string & why);
    // How many bytes from p on lie in one pinned piece; 0 when p is not pinned (through this device). Cut copies there: the
    // driver refuses those of partly pinned ranges, and whether two pieces are one range to it is not documented.
    size_t pinned_bytes_from(const void * p) const;

    // Starts the kernel on a stream of its own and returns. The bytes must have arrived, i.e. the caller has synchronised
    // the ggml backend that uploaded them; `out` may be used after wait().
    bool expand_fp8(const Fp8Expansion & job, std::string & why);
    // Until everything that expand_fp8 started has ended. An error of a kernel appears here.
    bool wait(std::string & why);

private:
    friend std::unique_ptr<CudaDevice> open_cuda_device(const char *, std::string &, const char *, const KernelImage &);
    class Current;
    struct Piece {
        void * begin;
        size_t bytes;
    };

    CudaDevice(std::unique_ptr<const CudaDriver> driver, std::string name) : driver_(std::move(driver)), name_(std::move(name)) {}
    bool start(const char * pci_bus_id, const KernelImage & image, std::string & why);
    void load_kernels(const KernelImage & image);
    CudaResult load_image(const void * image, std::string & why);
    void unregister(std::vector<Piece> & pieces, std::string * why);
    std::string failed(const char * symbol, CudaResult result) const;

    std::unique_ptr<const CudaDriver> driver_;
    std::string name_;
    int         device_      = -1;   // valid when retained_
    bool        retained_    = false;
    CudaHandle  context_     = nullptr;
    CudaHandle  stream_      = nullptr;
    CudaHandle  module_      = nullptr;
    CudaHandle  kernel_[2]   = {};   // by HalfType
    bool        pins_read_only_ = false;
    std::string why_no_kernels_ = "the kernels are not loaded";
    std::map<const void *, std::vector<Piece>> pinned_;  // by the `begin` of register_host
};

// The device that ggml's CUDA back end calls so (ggml_backend_dev_props.device_id; its suffix for virtual devices, "-v1", is
// ignored). Null with a sentence in `why` when there is no driver, no such device, or its context cannot be used. Only ever
// call it for a device of ggml's registry "CUDA": others must not load NVIDIA's driver. The last two parameters are for tests.
std::unique_ptr<CudaDevice> open_cuda_device(const char * pci_bus_id, std::string & why,
                                             const char * driver_library = "libcuda.so.1",
                                             const KernelImage & image = kernel_image());

}  // namespace hybrid_moe
