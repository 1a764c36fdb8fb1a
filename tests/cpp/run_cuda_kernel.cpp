// Runs the embedded kernels on every CUDA device of this machine, compares with the same arithmetic on the CPU bit for bit,
// pins memory, prints speeds. Exit status 77: nothing to run on, the reason is printed. By hand: docs/cuda.md.
#include "cuda/cuda_device.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

using namespace hybrid_moe;

namespace {

[[noreturn]] void fail(const std::string & what) {
    printf("failed: %s\n", what.c_str());
    exit(1);
}

[[noreturn]] void skip(const std::string & why) {
    printf("skipped: %s\n", why.c_str());
    exit(77);
}

// What a host does around our code; looked up by name, as the rest.
struct Driver {
    void * library;

    template <typename... Parameters> void call(const char * name, Parameters... parameters) const {
        const auto function = reinterpret_cast<int (*)(Parameters...)>(dlsym(library, name));
        if (!function) fail(std::string("no function ") + name);
        if (const int error = function(parameters...)) fail(std::string(name) + ": CUDA error " + std::to_string(error));
    }
};

struct DeviceMemory {
    const Driver & driver;
    uintptr_t p = 0;

    DeviceMemory(const Driver & d, size_t bytes) : driver(d) { driver.call("cuMemAlloc_v2", &p, bytes); }
    DeviceMemory(const DeviceMemory &) = delete;
    ~DeviceMemory() { driver.call("cuMemFree_v2", p); }
    void upload(const void * from, size_t bytes, size_t at = 0) const { driver.call("cuMemcpyHtoD_v2", p + at, from, bytes); }
    void download(void * to, size_t bytes, size_t at = 0) const { driver.call("cuMemcpyDtoH_v2", to, p + at, bytes); }
};

struct Shape { int64_t n_rows, k, block_rows, block_k; size_t codes_at, out_at; };

void compare(const Driver & driver, CudaDevice & device, const Shape & s, HalfType to, std::mt19937 & random) {
    const size_t n = size_t(s.n_rows * s.k), guard = 64;
    const size_t n_scales = size_t((s.n_rows + s.block_rows - 1) / s.block_rows * ((s.k + s.block_k - 1) / s.block_k));
    std::vector<uint8_t> codes(n);
    std::vector<float> scales(n_scales);
    for (size_t i = 0; i < n; i++) codes[i] = uint8_t(i < 256 ? i : random());
    for (float & f : scales) f = float_of(uint32_t(random()));  // any float: infinities, NaN and subnormals too
    for (size_t i = 0; i < n_scales; i += 2) scales[i] = float(random() % 10000) * 1e-5f;
    std::vector<uint16_t> out(n + 2 * guard, 0xA5A5), expected = out;
    Fp8Job job = {codes.data(), scales.data(), expected.data() + guard, uint64_t(s.n_rows), uint64_t(s.k), uint64_t(s.block_rows),
                  uint64_t(s.block_k), uint64_t((s.k + s.block_k - 1) / s.block_k)};
    for (uint64_t t = 0; t < blocks_of_grid(job) * threads_per_block; t++) {
        if (to == HalfType::bf16) expand_by_thread<HalfType::bf16>(job, t);
        else expand_by_thread<HalfType::f16>(job, t);
    }
    const DeviceMemory d_codes(driver, n + 16), d_scales(driver, n_scales * 4), d_out(driver, out.size() * 2 + 16);
    d_codes.upload(codes.data(), n, s.codes_at);
    d_scales.upload(scales.data(), n_scales * 4);
    d_out.upload(out.data(), out.size() * 2, s.out_at);
    std::string why;
    const Fp8Expansion e = {reinterpret_cast<void *>(d_codes.p + s.codes_at), reinterpret_cast<void *>(d_scales.p),
                            reinterpret_cast<void *>(d_out.p + s.out_at + guard * 2), s.n_rows, s.k, s.block_rows, s.block_k, to};
    if (!device.expand_fp8(e, why) || !device.wait(why)) fail(why);
    d_out.download(out.data(), out.size() * 2, s.out_at);
    for (size_t i = 0; i < out.size(); i++) {
        if (out[i] != expected[i]) {
            fail("element " + std::to_string(int64_t(i) - int64_t(guard)) + " of " + std::to_string(s.n_rows) + " x " +
                 std::to_string(s.k) + ": " + std::to_string(out[i]) + " instead of " + std::to_string(expected[i]));
        }
    }
}

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void measure(const Driver & driver, CudaDevice & device, HalfType to, int64_t n_rows, int n_launches) {
    constexpr int64_t k = 7168;
    const size_t n = size_t(n_rows * k);
    const DeviceMemory codes(driver, n), scales(driver, size_t((n_rows + 127) / 128 * (k / 128)) * 4), out(driver, n * 2);
    const Fp8Expansion e = {reinterpret_cast<void *>(codes.p), reinterpret_cast<void *>(scales.p),
                            reinterpret_cast<void *>(out.p), n_rows, k, 128, 128, to};
    std::string why;
    double best = 1e30;
    for (int repeat = 0; repeat < 3; repeat++) {
        const double start = seconds();
        for (int i = 0; i < n_launches; i++) {
            if (!device.expand_fp8(e, why)) fail(why);
        }
        if (!device.wait(why)) fail(why);
        best = std::min(best, seconds() - start);
    }
    const double gbps = double(n) * 3 * n_launches / best / 1e9;
    printf("  FP8 to %s, %lld x %lld: %.1f GB/s read and written (%.1f GB/s of codes)\n", to == HalfType::bf16 ? "BF16" : "F16",
           static_cast<long long>(n_rows), static_cast<long long>(k), gbps, gbps / 3);
}

// A file mapped read-only, as model files are, and anonymous memory: pinned, copied from, released.
void pin(const Driver & driver, CudaDevice & device, size_t bytes) {
    char path[] = "/tmp/hybrid-moe-cuda-XXXXXX";
    const int file = mkstemp(path);
    if (file < 0) fail("no temporary file");
    unlink(path);
    std::vector<char> content(bytes);
    for (size_t i = 0; i < bytes; i++) content[i] = char(i * 7 + i / 4096);
    if (write(file, content.data(), bytes) != ssize_t(bytes)) fail("the temporary file cannot be written");
    void * const mapped = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED) fail("the temporary file cannot be mapped");
    const DeviceMemory on_device(driver, bytes);
    const struct { const char * name; const void * p; bool read_only; } sources[] = {
        {"a file mapped read-only", mapped, true}, {"memory", content.data(), false}};
    for (const auto & source : sources) {
        std::string why;
        const bool pinned = device.register_host(source.p, bytes, source.read_only, why);
        if (pinned && device.pinned_bytes_from(source.p) < bytes) fail("less is pinned than asked for");
        on_device.upload(source.p, bytes);  // once to warm up
        const double start = seconds();
        on_device.upload(source.p, bytes);
        const double gbps = double(bytes) / (seconds() - start) / 1e9;
        std::vector<char> back(bytes);
        on_device.download(back.data(), bytes);
        if (memcmp(back.data(), source.p, bytes) != 0) fail("copied bytes differ");
        printf("  %s, %s: %.1f GB/s to the device\n", source.name, pinned ? "pinned" : ("not pinned: " + why).c_str(), gbps);
        if (pinned && !device.unregister_host(source.p, why)) fail(why);
        if (!pinned && !source.read_only) fail(why);
    }
    munmap(mapped, bytes);
}

void run_on(const Driver & driver, int i_device, bool quick) {
    int device_number = 0;
    char name[100] = {}, bus_id[32] = {};
    driver.call("cuDeviceGet", &device_number, i_device);
    driver.call("cuDeviceGetName", name, 99, device_number);
    driver.call("cuDeviceGetPCIBusId", bus_id, 31, device_number);
    void * context = nullptr;
    driver.call("cuDevicePrimaryCtxRetain", &context, device_number);
    driver.call("cuCtxPushCurrent_v2", context);
    std::string why;
    auto device = open_cuda_device(bus_id, why);
    if (!device) fail(why);
    if (!device->can_expand()) fail(device->why_not_expand());
    printf("%s (%s), kernels for %s\n", name, bus_id, kernel_image().architectures);
    std::mt19937 random(11);
    const Shape shapes[] = {{1, 256, 128, 128, 0, 0},  {1, 1, 128, 128, 0, 0},    {129, 300, 128, 128, 0, 0},
                            {64, 512, 128, 128, 8, 0}, {64, 512, 128, 128, 0, 2}, {257, 2048, 128, 128, 0, 0},
                            {7, 1000, 1, 1000, 0, 0},  {300, 77, 300, 77, 0, 0},  {130, 4096, 3, 48, 0, 0},
                            {5, 33, 2, 5, 1, 2}};
    for (const Shape & shape : shapes) {
        compare(driver, *device, shape, HalfType::bf16, random);
        compare(driver, *device, shape, HalfType::f16, random);
    }
    printf("  %zu matrices as on the CPU, to the bit\n", 2 * sizeof shapes / sizeof *shapes);
    const int64_t n_rows = quick ? 128 : 16 * 2048;  // 16 experts of DeepSeek-V3
    for (const HalfType to : {HalfType::bf16, HalfType::f16}) measure(driver, *device, to, n_rows, quick ? 1 : 10);
    pin(driver, *device, quick ? size_t(1) << 20 : size_t(256) << 20);
    device.reset();
    void * popped = nullptr;
    driver.call("cuCtxPopCurrent_v2", &popped);
    if (popped != context) fail("another context was left current");
    driver.call("cuDevicePrimaryCtxRelease_v2", device_number);
}

}  // namespace

int main(int argc, char ** argv) {
    const bool quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    void * const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) skip("no NVIDIA driver on this machine (libcuda.so.1)");
    if (!cuda_kernels_built()) skip("built without CUDA kernels: nvcc was not found");
    const Driver driver = {library};
    const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(library, "cuInit"));
    int n = 0;
    if (!init || init(0) != 0) skip("NVIDIA's driver finds no device");
    driver.call("cuDeviceGetCount", &n);
    if (n == 0) skip("NVIDIA's driver finds no device");
    for (int i = 0; i < n; i++) run_on(driver, i, quick);
    puts("ok");
    return 0;
}
