// One CUDA device: ggml-cuda's (the primary) context, one stream, one module, the pinned ranges.
#include "cuda/cuda_device.h"

#include <unistd.h>

#include <algorithm>
#include <climits>

namespace hybrid_moe {
namespace {

// Bounds the time of one driver call, which fetches and locks every page, and what a refusal throws away. Not measured.
constexpr size_t largest_piece = size_t(2) << 30;

std::string gib_text(size_t bytes) {
    const size_t tenths = (bytes * 10 + (size_t(1) << 29)) >> 30;
    return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " GiB";
}

// Empty when the kernel can run the job, else what is wrong with it.
std::string check(const Fp8Expansion & e) {
    if (!e.codes || !e.scales || !e.out) return "a device pointer is null";
    if (uintptr_t(e.scales) % alignof(float) != 0) return "the scales are not aligned to 4 bytes";
    if (uintptr_t(e.out) % alignof(uint16_t) != 0) return "the output is not aligned to 2 bytes";
    if (e.n_rows <= 0 || e.k <= 0) return "the matrix is empty: " + std::to_string(e.n_rows) + " x " + std::to_string(e.k);
    if (e.block_rows <= 0 || e.block_k <= 0) {
        return "scale blocks of " + std::to_string(e.block_rows) + " x " + std::to_string(e.block_k) + " do not exist";
    }
    if (e.to != HalfType::bf16 && e.to != HalfType::f16) return "the type to expand to is neither BF16 nor F16";
    // 2^31 - 1 blocks of 4096 codes; a matrix of that size fits no device.
    constexpr int64_t most = int64_t(INT32_MAX) * codes_per_thread * threads_per_block;
    if (e.n_rows > most / e.k) return "the matrix is too large: " + std::to_string(e.n_rows) + " x " + std::to_string(e.k);
    return "";
}

// Blocks are cut to the matrix, so that the kernel divides by numbers of 32 bits.
Fp8Job job_of(const Fp8Expansion & e) {
    Fp8Job job = {};
    job.codes      = static_cast<const uint8_t *>(e.codes);
    job.scale      = static_cast<const float *>(e.scales);
    job.out        = static_cast<uint16_t *>(e.out);
    job.n_rows     = uint64_t(e.n_rows);
    job.k          = uint64_t(e.k);
    job.block_rows = uint64_t(std::min(e.block_rows, e.n_rows));
    job.block_k    = uint64_t(std::min(e.block_k, e.k));
    job.n_k_blocks = (job.k + job.block_k - 1) / job.block_k;
    return job;
}

}  // namespace

// Makes our context current while it lives, and the caller's again after: ggml-cuda must find its own.
class CudaDevice::Current {
public:
    explicit Current(const CudaDevice & device) : driver_(*device.driver_), result_(driver_.context_push(device.context_)) {}
    ~Current() {
        CudaHandle ours = nullptr;
        if (result_ == 0) driver_.context_pop(&ours);
    }
    Current(const Current &) = delete;
    Current & operator=(const Current &) = delete;
    CudaResult result() const { return result_; }

private:
    const CudaDriver & driver_;
    const CudaResult   result_;
};

std::string CudaDevice::failed(const char * symbol, CudaResult result) const {
    return name_ + ": " + driver_->failure(symbol, result);
}

std::unique_ptr<CudaDevice> open_cuda_device(const char * pci_bus_id, std::string & why, const char * driver_library,
                                             const KernelImage & image) {
    if (!pci_bus_id || !*pci_bus_id) {
        why = "this CUDA device has no PCI bus id, so it cannot be found in NVIDIA's driver";
        return nullptr;
    }
    std::string id = pci_bus_id;
    id.resize(std::min(id.find('-'), id.size()));
    auto driver = load_cuda_driver(driver_library, why);
    if (!driver) return nullptr;
    std::unique_ptr<CudaDevice> device(new CudaDevice(std::move(driver), "CUDA device " + id));
    if (!device->start(id.c_str(), image, why)) return nullptr;
    return device;
}

// What has been taken when a step fails is given back by the destructor.
bool CudaDevice::start(const char * pci_bus_id, const KernelImage & image, std::string & why) {
    if (const CudaResult r = driver_->device_get_by_pci_bus_id(&device_, pci_bus_id)) {
        why = failed("cuDeviceGetByPCIBusId", r);
        return false;
    }
    if (const CudaResult r = driver_->primary_context_retain(&context_, device_)) {
        why = failed("cuDevicePrimaryCtxRetain", r);
        return false;
    }
    retained_ = true;
    const Current current(*this);
    if (current.result() != 0) {
        why = failed("cuCtxPushCurrent", current.result());
        return false;
    }
    if (const CudaResult r = driver_->stream_create(&stream_, cuda_stream_non_blocking)) {
        stream_ = nullptr;
        why = failed("cuStreamCreate", r);
        return false;
    }
    int supported = 0;  // drivers before CUDA 11.1 do not know the question
    const CudaResult asked = driver_->device_get_attribute(&supported, cuda_attribute_read_only_host_register, device_);
    pins_read_only_ = asked == 0 && supported != 0;
    load_kernels(image);
    return true;
}

// The fatbin, or, when the driver is older than the toolkit it comes from, the PTX text that old drivers compile too.
void CudaDevice::load_kernels(const KernelImage & image) {
    if (!image.fatbin) {
        why_no_kernels_ = "this library was built without CUDA kernels: build it where nvcc is found, with HYBRID_MOE_CUDA=ON";
        return;
    }
    std::string why;
    if (load_image(image.fatbin, why) == 0) return;
    std::string why_ptx;
    if (image.ptx && load_image(image.ptx, why_ptx) == 0) return;
    why_no_kernels_ = why + " (kernels built with CUDA " + image.toolkit + ", the driver serves CUDA " +
                      cuda_version_text(driver_->version) + ": update the driver, or build with an older nvcc)";
}

CudaResult CudaDevice::load_image(const void * image, std::string & why) {
    if (const CudaResult r = driver_->module_load_data(&module_, image)) {
        module_ = nullptr;
        why = failed("cuModuleLoadData", r);
        return r;
    }
    for (const HalfType type : {HalfType::bf16, HalfType::f16}) {
        if (const CudaResult r = driver_->module_get_function(&kernel_[int(type)], module_, entry_point(type))) {
            why = failed("cuModuleGetFunction", r);
            driver_->module_unload(module_);
            module_ = nullptr;
            return r;
        }
    }
    why_no_kernels_.clear();
    return 0;
}

// Errors have nowhere to go: they come from a driver that is shutting down, or repeat what wait() said.
CudaDevice::~CudaDevice() {
    if (!retained_) return;
    {
        const Current current(*this);
        if (current.result() == 0) {
            if (stream_) driver_->stream_synchronize(stream_);
            for (auto & range : pinned_) unregister(range.second, nullptr);
            if (module_) driver_->module_unload(module_);
            if (stream_) driver_->stream_destroy(stream_);
        }
    }
    driver_->primary_context_release(device_);
}

bool CudaDevice::register_host(const void * begin, size_t bytes, bool read_only, std::string & why) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    const uintptr_t first = uintptr_t(begin) & ~(page - 1);
    if (!begin || bytes == 0 || bytes > UINTPTR_MAX - page - uintptr_t(begin)) {
        why = name_ + ": no memory to pin (" + std::to_string(bytes) + " bytes)";
        return false;
    }
    if (pinned_.count(begin)) {
        why = name_ + ": that memory is pinned already";
        return false;
    }
    const uintptr_t end = (uintptr_t(begin) + bytes + page - 1) & ~(page - 1);
    const Current current(*this);
    if (current.result() != 0) {
        why = failed("cuCtxPushCurrent", current.result());
        return false;
    }
    std::vector<Piece> & pieces = pinned_[begin];
    pieces.reserve((end - first + largest_piece - 1) / largest_piece);
    const unsigned flags = cuda_host_register_portable | (read_only && pins_read_only_ ? cuda_host_register_read_only : 0);
    for (uintptr_t at = first; at < end; at += pieces.back().bytes) {
        const Piece piece = {reinterpret_cast<void *>(at), std::min<size_t>(end - at, largest_piece)};
        if (const CudaResult r = driver_->mem_host_register(piece.begin, piece.bytes, flags)) {
            why = failed("cuMemHostRegister", r) + ", after " + gib_text(at - first) + " of " + gib_text(end - first) +
                  (read_only && !pins_read_only_ ? "; this device does not pin read-only memory" : "");
            unregister(pieces, nullptr);
            pinned_.erase(begin);
            return false;
        }
        pieces.push_back(piece);
    }
    return true;
}

// With our context current. All pieces are tried; the first error goes to `why`.
void CudaDevice::unregister(std::vector<Piece> & pieces, std::string * why) {
    for (; !pieces.empty(); pieces.pop_back()) {
        const CudaResult r = driver_->mem_host_unregister(pieces.back().begin);
        if (r != 0 && why && why->empty()) *why = failed("cuMemHostUnregister", r);
    }
}

bool CudaDevice::unregister_host(const void * begin, std::string & why) {
    const auto range = pinned_.find(begin);
    if (range == pinned_.end()) {
        why = name_ + ": that memory is not pinned";
        return false;
    }
    const Current current(*this);
    if (current.result() != 0) {
        why = failed("cuCtxPushCurrent", current.result());
        return false;
    }
    std::string failure;
    unregister(range->second, &failure);
    pinned_.erase(range);
    if (failure.empty()) return true;
    why = failure;
    return false;
}

size_t CudaDevice::pinned_bytes_from(const void * p) const {
    for (const auto & range : pinned_) {
        for (const Piece & piece : range.second) {
            const size_t offset = uintptr_t(p) - uintptr_t(piece.begin);
            if (uintptr_t(p) >= uintptr_t(piece.begin) && offset < piece.bytes) return piece.bytes - offset;
        }
    }
    return 0;
}

bool CudaDevice::expand_fp8(const Fp8Expansion & expansion, std::string & why) {
    if (!can_expand()) {
        why = why_no_kernels_;
        return false;
    }
    const std::string wrong = check(expansion);
    if (!wrong.empty()) {
        why = name_ + ": FP8 cannot be expanded: " + wrong;
        return false;
    }
    const Current current(*this);
    if (current.result() != 0) {
        why = failed("cuCtxPushCurrent", current.result());
        return false;
    }
    Fp8Job job = job_of(expansion);
    void * parameters[] = {&job};
    const unsigned n_blocks = unsigned(blocks_of_grid(job));
    const CudaResult r = driver_->launch_kernel(kernel_[int(expansion.to)], n_blocks, 1, 1, threads_per_block, 1, 1, 0, stream_,
                                                parameters, nullptr);
    if (r != 0) why = failed("cuLaunchKernel", r);
    return r == 0;
}

bool CudaDevice::wait(std::string & why) {
    const Current current(*this);
    CudaResult r = current.result();
    if (r != 0) {
        why = failed("cuCtxPushCurrent", r);
        return false;
    }
    r = driver_->stream_synchronize(stream_);
    if (r != 0) why = failed("cuStreamSynchronize", r);
    return r == 0;
}

}  // namespace hybrid_moe
