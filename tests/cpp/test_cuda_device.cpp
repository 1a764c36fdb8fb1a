// CudaDevice against the fake driver: order of calls, contexts, every call failing once, pinning, wrong input.
// Arguments: the fake library, and the one of an old driver.
#include "cuda/cuda_device.h"
#include "fake_cuda.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using namespace hybrid_moe;

namespace {

const char * library;
const char * old_library;
FakeCuda * fake;
constexpr KernelImage image = {"fatbin", "ptx", "sm_75", "13.0"};
constexpr size_t gib = size_t(1) << 30;

#define CHECK(condition) check(condition, #condition, __LINE__)

void check(bool holds, const char * what, int line, const std::string & detail = "") {
    if (holds) return;
    printf("line %d: not so: %s %s\n", line, what, detail.c_str());
    for (const std::string & call : fake->calls) printf("  %s\n", call.c_str());
    for (const std::string & m : fake->misuse) printf("  misuse: %s\n", m.c_str());
    exit(1);
}

// `why` says the reason, as one sentence on one line.
void check_why(const std::string & why, const char * part, int line) {
    check(why.find(part) != std::string::npos && why.find('\n') == std::string::npos, part, line, "in: " + why);
}
#define CHECK_WHY(why, part) check_why(why, part, __LINE__)

size_t count(const std::string & name) {
    const auto called = [&](const std::string & call) { return call.rfind(name, 0) == 0; };
    return size_t(std::count_if(fake->calls.begin(), fake->calls.end(), called));
}

std::unique_ptr<CudaDevice> open(std::string & why, const char * id = "0000:01:00.0") {
    return open_cuda_device(id, why, library, image);
}

// Address space only: no test touches it, and neither does the fake.
struct Range {
    size_t bytes;
    char * begin;
    explicit Range(size_t n) : bytes(n) {
        begin = static_cast<char *>(mmap(nullptr, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        if (begin == MAP_FAILED) check(false, "mmap", __LINE__);
    }
    ~Range() { munmap(begin, bytes); }
};

// 3 x 40 codes in blocks of 2 x 32, all values of the result below.
struct Matrix {
    alignas(16) uint8_t codes[3 * 40];
    float scales[4] = {1.0f, 2.0f, 4.0f, 8.0f};
    alignas(16) uint16_t out[3 * 40] = {};

    Matrix() { memset(codes, 0x38, sizeof codes); }  // 1.0
    Fp8Expansion expansion(HalfType to = HalfType::bf16) { return {codes, scales, out, 3, 40, 2, 32, to}; }
    bool expanded(HalfType to = HalfType::bf16) const {
        const uint16_t bf16[] = {0x3F80, 0x4000, 0x4080, 0x4100}, f16[] = {0x3C00, 0x4000, 0x4400, 0x4800};
        const uint16_t * const one_to_eight = to == HalfType::bf16 ? bf16 : f16;
        for (int row = 0; row < 3; row++) {
            for (int i = 0; i < 40; i++) {
                if (out[row * 40 + i] != one_to_eight[row / 2 * 2 + i / 32]) return false;
            }
        }
        return true;
    }
};

// Everything once. True when all of it worked; else `why` is the first reason.
bool whole_life(const Range & range, Matrix & matrix, std::string & why) {
    const auto device = open(why);
    if (!device) return false;
    std::string ignored;
    const bool pinned = device->register_host(range.begin, range.bytes, true, why);
    const bool expanded = device->can_expand() ? device->expand_fp8(matrix.expansion(), pinned ? why : ignored)
                                               : (why = device->why_not_expand(), false);
    const bool waited = device->wait(pinned && expanded ? why : ignored);
    const bool unpinned = !pinned || device->unregister_host(range.begin, expanded && waited ? why : ignored);
    return pinned && expanded && waited && unpinned;
}

void order_of_calls() {
    *fake = FakeCuda{};
    const Range range(5 * gib);
    Matrix matrix;
    std::string why;
    CHECK(whole_life(range, matrix, why) && why.empty());
    CHECK(matrix.expanded());
    const std::string two = std::to_string(2 * gib), one = std::to_string(gib);
    const std::vector<std::string> expected = {
        "cuDriverGetVersion", "cuInit", "cuDeviceGetByPCIBusId 0000:01:00.0", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2",
        "cuStreamCreate 1", "cuDeviceGetAttribute 113", "cuModuleLoadData fatbin", "cuModuleGetFunction hybrid_moe_fp8_to_bf16",
        "cuModuleGetFunction hybrid_moe_fp8_to_f16", "cuCtxPopCurrent_v2",
        "cuCtxPushCurrent_v2", "cuMemHostRegister_v2 " + two + " 9", "cuMemHostRegister_v2 " + two + " 9",
        "cuMemHostRegister_v2 " + one + " 9", "cuCtxPopCurrent_v2",
        "cuCtxPushCurrent_v2", "cuLaunchKernel 1", "cuCtxPopCurrent_v2",
        "cuCtxPushCurrent_v2", "cuStreamSynchronize", "cuCtxPopCurrent_v2",
        "cuCtxPushCurrent_v2", "cuMemHostUnregister", "cuMemHostUnregister", "cuMemHostUnregister", "cuCtxPopCurrent_v2",
        "cuCtxPushCurrent_v2", "cuStreamSynchronize", "cuModuleUnload", "cuStreamDestroy_v2", "cuCtxPopCurrent_v2",
        "cuDevicePrimaryCtxRelease_v2"};
    CHECK(fake->calls == expected);
    CHECK(fake->misuse.empty() && fake->nothing_alive());
}

// Every call of a life fails once, with a named and with an unnamed error.
void every_call_fails_once() {
    const Range range(5 * gib);
    int n = 0;
    for (const int error : {2, 12345}) {
        for (int i = 1;; i++, n++) {
            *fake = FakeCuda{};
            fake->fail_call = i;
            fake->fail_with = error;
            Matrix matrix;
            std::string why;
            const bool worked = whole_life(range, matrix, why);
            if (fake->failed.empty()) break;
            CHECK(fake->misuse.empty());
            const std::string & f = fake->failed;
            const bool forgivable = f == "cuCtxPopCurrent_v2" || f == "cuDeviceGetAttribute" || f == "cuDriverGetVersion" ||
                                    f == "cuModuleUnload" || f == "cuStreamDestroy_v2" || f == "cuDevicePrimaryCtxRelease_v2" ||
                                    f == "cuModuleLoadData" || f == "cuModuleGetFunction";  // the PTX text is tried then
            const bool in_destructor = count("cuMemHostUnregister") == 3 && count("cuModuleUnload") <= 1 && worked;
            check(worked ? forgivable || in_destructor : !why.empty(), "a failure is reported", __LINE__, f + ": " + why);
            if (!worked) CHECK_WHY(why, error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "unknown CUDA error 12345");
            if (f == "cuDeviceGetAttribute") CHECK(count("cuMemHostRegister_v2 " + std::to_string(gib) + " 1") == 1);
            // Without a current context the destructor can only give the context itself back.
            if (f == "cuCtxPushCurrent_v2" && in_destructor) CHECK(fake->retained == 0 && fake->stack.empty());
            else CHECK(fake->nothing_alive());
        }
    }
    printf("%d failing calls\n", n);
    CHECK(n > 60);
}

void contexts_of_others_stay() {
    *fake = FakeCuda{};
    std::string why;
    const int other = 0;
    fake->stack.push_back(&other);
    auto device = open(why);
    Matrix matrix;
    CHECK(device && fake->stack.size() == 1 && fake->stack[0] == &other);
    CHECK(device->expand_fp8(matrix.expansion(), why) && device->wait(why) && fake->stack.size() == 1);
    device.reset();
    CHECK(fake->stack.size() == 1 && fake->stack[0] == &other && fake->retained == 0);
}

void devices_that_cannot_be_opened() {
    std::string why;
    *fake = FakeCuda{};
    CHECK(!open(why, "0000:02:00.0"));
    CHECK_WHY(why, "CUDA device 0000:02:00.0: cuDeviceGetByPCIBusId failed: CUDA_ERROR_INVALID_VALUE");
    CHECK(!open(why, nullptr) && !open(why, ""));
    CHECK_WHY(why, "has no PCI bus id");
    CHECK(open(why, "0000:01:00.0-v1") != nullptr);  // ggml's name of a virtual device
    CHECK(fake->nothing_alive() && fake->misuse.empty());

    *fake = FakeCuda{};
    fake->version = 10020;
    CHECK(!open(why));
    CHECK_WHY(why, "serves CUDA 10.2, at least 11.0 is needed: update NVIDIA's driver");
    CHECK(fake->calls == std::vector<std::string>{"cuDriverGetVersion"});

    CHECK(!open_cuda_device("0000:01:00.0", why, old_library, image));
    CHECK_WHY(why, "has no function cuDevicePrimaryCtxRelease_v2: update NVIDIA's driver");
    CHECK(!open_cuda_device("0000:01:00.0", why, "libm.so.6", image));
    CHECK_WHY(why, "libm.so.6 has no function cuDriverGetVersion");
    CHECK(!open_cuda_device("0000:01:00.0", why, "/no/such/libcuda.so.1", image));
    CHECK_WHY(why, "/no/such/libcuda.so.1 cannot be opened");
}

void kernels_that_do_not_load() {
    std::string why;
    Matrix matrix;
    const Range range(gib);
    // An older driver compiles the PTX text.
    *fake = FakeCuda{};
    fake->refused_images = 1;
    auto device = open(why);
    CHECK(device && device->can_expand() && count("cuModuleLoadData ptx") == 1);
    CHECK(device->expand_fp8(matrix.expansion(HalfType::f16), why) && device->wait(why) && matrix.expanded(HalfType::f16));
    device.reset();
    CHECK(fake->nothing_alive());
    // Or not even that; pinning works all the same.
    fake->refused_images = 2;
    device = open(why);
    CHECK(device && !device->can_expand() && !device->expand_fp8(matrix.expansion(), why));
    CHECK_WHY(why, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION (kernels built with CUDA 13.0, the driver serves CUDA 12.4: update");
    CHECK(device->register_host(range.begin, gib, false, why) && device->unregister_host(range.begin, why));
    // A library without kernels.
    device = open_cuda_device("0000:01:00.0", why, library, KernelImage{nullptr, nullptr, "", ""});
    CHECK(device && !device->can_expand() && !device->expand_fp8(matrix.expansion(), why) && count("cuLaunchKernel") == 1);
    CHECK_WHY(why, "built without CUDA kernels");
    CHECK(device->register_host(range.begin, gib, false, why));
    device.reset();
    CHECK(fake->nothing_alive() && fake->misuse.empty());
}

void pinning() {
    *fake = FakeCuda{};
    std::string why;
    const Range range(5 * gib);
    auto device = open(why);
    // Whole pages around an odd range; writable memory without the read-only flag.
    CHECK(device->register_host(range.begin + 5000, 4096, false, why));
    CHECK(fake->pinned.size() == 1 && fake->pinned[range.begin + 4096] == 8192);
    CHECK(fake->calls[fake->calls.size() - 2] == "cuMemHostRegister_v2 8192 1");
    CHECK(device->pinned_bytes_from(range.begin + 4095) == 0 && device->pinned_bytes_from(range.begin + 4096) == 8192);
    CHECK(device->pinned_bytes_from(range.begin + 12287) == 1 && device->pinned_bytes_from(range.begin + 12288) == 0);
    CHECK(!device->register_host(range.begin + 5000, 1, false, why));
    CHECK_WHY(why, "pinned already");
    // Overlapping an earlier one: nothing of the new one stays, the old one does.
    CHECK(!device->register_host(range.begin + 8192, 4 * gib, true, why));
    CHECK_WHY(why, "cuMemHostRegister failed: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, after 0.0 GiB of 4.0 GiB");
    CHECK(fake->pinned.size() == 1);
    CHECK(device->unregister_host(range.begin + 5000, why) && fake->pinned.empty());
    // All or nothing: the third piece fails.
    fake->fail_call = 4;  // push, register, register, register
    CHECK(!device->register_host(range.begin, 5 * gib, true, why) && fake->failed == "cuMemHostRegister_v2");
    CHECK_WHY(why, "CUDA_ERROR_OUT_OF_MEMORY, after 4.0 GiB of 5.0 GiB");
    CHECK(fake->pinned.empty() && device->pinned_bytes_from(range.begin) == 0 && count("cuMemHostUnregister") == 3);
    // Pieces end at 2 GiB; what is still pinned at the end is given back.
    CHECK(device->register_host(range.begin, 5 * gib, true, why));
    CHECK(device->pinned_bytes_from(range.begin + gib) == gib && device->pinned_bytes_from(range.begin + 2 * gib) == 2 * gib);
    CHECK(device->pinned_bytes_from(range.begin + 5 * gib - 1) == 1);
    for (const size_t bytes : {size_t(0), SIZE_MAX, SIZE_MAX - size_t(range.begin)}) {
        CHECK(!device->register_host(range.begin + gib, bytes, true, why));
        CHECK_WHY(why, "no memory to pin");
    }
    CHECK(!device->register_host(nullptr, 4096, true, why) && !device->unregister_host(range.begin + gib, why));
    CHECK_WHY(why, "is not pinned");
    // One piece cannot be unregistered: the others are, and the range is forgotten.
    fake->fail_call = 3;
    CHECK(!device->unregister_host(range.begin, why) && fake->failed == "cuMemHostUnregister" && fake->pinned.empty());
    CHECK_WHY(why, "cuMemHostUnregister failed: CUDA_ERROR_OUT_OF_MEMORY");
    CHECK(device->register_host(range.begin, 5 * gib, true, why));
    device.reset();
    CHECK(fake->nothing_alive() && fake->misuse.empty());
    // A device without read-only pinning is not asked for it.
    *fake = FakeCuda{};
    fake->pins_read_only = false;
    device = open(why);
    CHECK(device->register_host(range.begin, 4096, true, why) && count("cuMemHostRegister_v2 4096 1") == 1);
    fake->fail_call = 2;
    fake->fail_with = 801;
    CHECK(!device->register_host(range.begin + 4096, 4096, true, why));
    CHECK_WHY(why, "CUDA_ERROR_NOT_SUPPORTED, after 0.0 GiB of 0.0 GiB; this device does not pin read-only memory");
}

void wrong_expansions() {
    *fake = FakeCuda{};
    std::string why;
    auto device = open(why);
    Matrix matrix;
    const auto refused = [&](void (*spoil)(Fp8Expansion &), const char * part, int line) {
        Fp8Expansion e = matrix.expansion();
        spoil(e);
        check(!device->expand_fp8(e, why), part, line);
        check_why(why, part, line);
    };
#define REFUSED(change, part) refused([](Fp8Expansion & e) { change; }, part, __LINE__)
    REFUSED(e.codes = nullptr, "a device pointer is null");
    REFUSED(e.scales = nullptr, "a device pointer is null");
    REFUSED(e.out = nullptr, "a device pointer is null");
    REFUSED(e.scales = static_cast<const char *>(e.scales) + 2, "scales are not aligned to 4");
    REFUSED(e.out = static_cast<char *>(e.out) + 1, "output is not aligned to 2");
    REFUSED(e.n_rows = 0, "the matrix is empty: 0 x 40");
    REFUSED(e.k = -1, "the matrix is empty: 3 x -1");
    REFUSED(e.block_rows = 0, "scale blocks of 0 x 32");
    REFUSED(e.block_k = -5, "scale blocks of 2 x -5");
    REFUSED(e.n_rows = INT64_MAX, "too large");
    REFUSED(e.k = int64_t(1) << 43, "too large");
    REFUSED(e.to = HalfType(2), "neither BF16 nor F16");
    CHECK(count("cuLaunchKernel") == 0);
    // Blocks larger than the matrix are one scale for all.
    Fp8Expansion e = matrix.expansion();
    e.block_rows = e.block_k = INT64_MAX;
    CHECK(device->expand_fp8(e, why) && device->wait(why) && matrix.out[0] == 0x3F80 && matrix.out[119] == 0x3F80);
    // A kernel that faults: everything says so from then on, nothing ends the process.
    fake->fail_call = 2;
    fake->fail_with = 719;
    CHECK(!device->wait(why));
    CHECK_WHY(why, "CUDA device 0000:01:00.0: cuStreamSynchronize failed: CUDA_ERROR_LAUNCH_FAILED");
    device.reset();
    CHECK(fake->nothing_alive() && fake->misuse.empty());
}

// What is really embedded is opened the same way.
void the_embedded_image() {
    *fake = FakeCuda{};
    std::string why;
    const auto device = open_cuda_device("0000:01:00.0", why, library);
    CHECK(device && device->can_expand() == cuda_kernels_built());
    printf("kernels: %s\n", cuda_kernels_built() ? kernel_image().architectures : "none");
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 3) return 2;
    library = argv[1];
    old_library = argv[2];
    void * handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        puts(dlerror());
        return 1;
    }
    fake = &reinterpret_cast<FakeCuda & (*)()>(dlsym(handle, "fake_cuda"))();
    order_of_calls();
    every_call_fails_once();
    contexts_of_others_stay();
    devices_that_cannot_be_opened();
    kernels_that_do_not_load();
    pinning();
    wrong_expansions();
    the_embedded_image();
    puts("ok");
    return 0;
}
