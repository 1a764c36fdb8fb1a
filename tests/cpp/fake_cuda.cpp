// A libcuda.so.1 without a GPU: device memory is host memory, a launch runs the kernel's body over the grid. Checks what the
// real driver would refuse, counts what is alive and fails where a test says so. Signatures are those of the driver API
// documentation, written again here: they do not come from the code under test.
#include "fake_cuda.h"

#include "cuda/fp8_expand_body.h"

#include <cstdlib>
#include <cstring>

using namespace hybrid_moe;

namespace {

FakeCuda state;
int the_context, the_module, the_stream, the_kernels[2];
int nothing;  // what outputs point to after a failure

enum : int {
    invalid_value = 1, not_initialized = 3, no_device = 100, invalid_context = 201, bad_ptx_version = 222, invalid_handle = 400,
    not_found = 500, already_registered = 712, not_registered = 713, launch_failed = 719, not_supported = 801,
};

// One call: logged, counted, and 0 or the error it shall return. Calls that give something back do so in any case, as the
// driver's do: their errors are those of earlier work.
int call(const std::string & name, const std::string & arguments = "") {
    state.calls.push_back(arguments.empty() ? name : name + " " + arguments);
    if (state.fail_call == 0 || --state.fail_call != 0) return 0;
    state.failed = name;
    return state.fail_with;
}

int misuse(const std::string & what, int error) {
    state.misuse.push_back(what);
    return error;
}

int need_context(const char * name) {
    if (!state.started) return misuse(std::string(name) + " before cuInit", not_initialized);
    if (state.stack.empty()) return misuse(std::string(name) + " without a current context", invalid_context);
    return 0;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define RETURN_IF(error) \
    if (const int early = error) return early

EXPORTED FakeCuda & fake_cuda() { return state; }

EXPORTED int cuGetErrorName(int error, const char ** name) {
    switch (error) {
        case invalid_value: *name = "CUDA_ERROR_INVALID_VALUE"; return 0;
        case 2: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return 0;
        case no_device: *name = "CUDA_ERROR_NO_DEVICE"; return 0;
        case bad_ptx_version: *name = "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"; return 0;
        case launch_failed: *name = "CUDA_ERROR_LAUNCH_FAILED"; return 0;
        case already_registered: *name = "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"; return 0;
        case not_supported: *name = "CUDA_ERROR_NOT_SUPPORTED"; return 0;
        default: *name = nullptr; return invalid_value;
    }
}

EXPORTED int cuDriverGetVersion(int * version) {
    RETURN_IF(call("cuDriverGetVersion"));
    *version = state.version;
    return 0;
}

EXPORTED int cuInit(unsigned flags) {
    RETURN_IF(call("cuInit"));
    if (flags != 0) return misuse("cuInit with flags", invalid_value);
    state.started = true;
    return 0;
}

EXPORTED int cuDeviceGetByPCIBusId(int * device, const char * id) {
    RETURN_IF(call("cuDeviceGetByPCIBusId", id));
    if (!state.started) return misuse("cuDeviceGetByPCIBusId before cuInit", not_initialized);
    if (state.bus_id != id) return invalid_value;
    *device = 0;
    return 0;
}

EXPORTED int cuDeviceGetAttribute(int * value, int attribute, int device) {
    *value = 77;
    RETURN_IF(call("cuDeviceGetAttribute", std::to_string(attribute)));
    if (device != 0) return misuse("an unknown device", no_device);
    if (attribute != 113) return invalid_value;
    *value = state.pins_read_only;
    return 0;
}

EXPORTED int cuDevicePrimaryCtxRetain(void ** context, int device) {
    *context = &nothing;
    RETURN_IF(call("cuDevicePrimaryCtxRetain"));
    if (device != 0 || !state.started) return misuse("an unknown device", no_device);
    state.retained++;
    *context = &the_context;
    return 0;
}

#ifndef FAKE_CUDA_OLD  // the symbol came with CUDA 11.0
EXPORTED int cuDevicePrimaryCtxRelease_v2(int device) {
    const int e = call("cuDevicePrimaryCtxRelease_v2");
    if (device != 0 || state.retained == 0) return misuse("a context released that was not retained", invalid_context);
    state.retained--;
    return e;
}
#endif

EXPORTED int cuCtxPushCurrent_v2(void * context) {
    RETURN_IF(call("cuCtxPushCurrent_v2"));
    if (context != &the_context || state.retained == 0) return misuse("an unknown context pushed", invalid_context);
    state.stack.push_back(context);
    return 0;
}

EXPORTED int cuCtxPopCurrent_v2(void ** context) {
    const int e = call("cuCtxPopCurrent_v2");
    if (state.stack.empty()) return misuse("a context popped from an empty stack", invalid_context);
    *context = const_cast<void *>(state.stack.back());
    state.stack.pop_back();
    return e;
}

EXPORTED int cuModuleLoadData(void ** module, const void * image) {
    *module = &nothing;
    RETURN_IF(call("cuModuleLoadData", static_cast<const char *>(image)));
    RETURN_IF(need_context("cuModuleLoadData"));
    if (state.refused_images > 0) {
        state.refused_images--;
        return bad_ptx_version;
    }
    state.modules++;
    *module = &the_module;
    return 0;
}

EXPORTED int cuModuleGetFunction(void ** function, void * module, const char * name) {
    *function = &nothing;
    RETURN_IF(call("cuModuleGetFunction", name));
    RETURN_IF(need_context("cuModuleGetFunction"));
    if (module != &the_module || state.modules == 0) return misuse("an unknown module", invalid_handle);
    for (const int type : {0, 1}) {
        if (std::string(name) == (type ? "hybrid_moe_fp8_to_f16" : "hybrid_moe_fp8_to_bf16")) {
            *function = &the_kernels[type];
            return 0;
        }
    }
    return not_found;
}

EXPORTED int cuModuleUnload(void * module) {
    const int e = call("cuModuleUnload");
    RETURN_IF(need_context("cuModuleUnload"));
    if (module != &the_module || state.modules == 0) return misuse("an unknown module unloaded", invalid_handle);
    state.modules--;
    return e;
}

EXPORTED int cuStreamCreate(void ** stream, unsigned flags) {
    *stream = &nothing;
    RETURN_IF(call("cuStreamCreate", std::to_string(flags)));
    RETURN_IF(need_context("cuStreamCreate"));
    state.streams++;
    *stream = &the_stream;
    return 0;
}

EXPORTED int cuStreamSynchronize(void * stream) {
    const int e = call("cuStreamSynchronize");
    RETURN_IF(need_context("cuStreamSynchronize"));
    if (stream != &the_stream || state.streams == 0) return misuse("an unknown stream", invalid_handle);
    return e;
}

EXPORTED int cuStreamDestroy_v2(void * stream) {
    const int e = call("cuStreamDestroy_v2");
    RETURN_IF(need_context("cuStreamDestroy_v2"));
    if (stream != &the_stream || state.streams == 0) return misuse("an unknown stream destroyed", invalid_handle);
    state.streams--;
    return e;
}

EXPORTED int cuMemHostRegister_v2(void * begin, size_t bytes, unsigned flags) {
    RETURN_IF(call("cuMemHostRegister_v2", std::to_string(bytes) + " " + std::to_string(flags)));
    RETURN_IF(need_context("cuMemHostRegister_v2"));
    char * const first = static_cast<char *>(begin);
    if (bytes == 0 || uintptr_t(begin) % 4096 != 0 || bytes % 4096 != 0) return misuse("no whole pages", invalid_value);
    if ((flags & 8) && !state.pins_read_only) return not_supported;
    for (const auto & range : state.pinned) {
        if (first < range.first + range.second && range.first < first + bytes) return already_registered;
    }
    state.pinned[first] = bytes;
    return 0;
}

EXPORTED int cuMemHostUnregister(void * begin) {
    const int e = call("cuMemHostUnregister");
    RETURN_IF(need_context("cuMemHostUnregister"));
    if (state.pinned.erase(static_cast<char *>(begin)) == 0) return misuse("unknown memory unregistered", not_registered);
    return e;
}

EXPORTED int cuLaunchKernel(void * function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared, void * stream, void ** parameters,
                            void ** extra) {
    RETURN_IF(call("cuLaunchKernel", std::to_string(grid_x)));
    RETURN_IF(need_context("cuLaunchKernel"));
    if (stream != &the_stream || state.streams == 0) return misuse("a launch without its stream", invalid_handle);
    if (state.modules == 0) return misuse("a launch without its module", invalid_handle);
    if (function != &the_kernels[0] && function != &the_kernels[1]) return misuse("an unknown function", invalid_handle);
    if (grid_x == 0 || grid_x > 0x7FFFFFFF || grid_y != 1 || grid_z != 1 || block_x != threads_per_block || block_y != 1 ||
        block_z != 1 || shared != 0 || !parameters || extra) {
        return misuse("a launch with a wrong grid", invalid_value);
    }
    Fp8Job job;
    memcpy(&job, parameters[0], sizeof job);
    for (uint64_t thread = 0; thread < uint64_t(grid_x) * block_x; thread++) {
        if (function == &the_kernels[0]) expand_by_thread<HalfType::bf16>(job, thread);
        else expand_by_thread<HalfType::f16>(job, thread);
    }
    return 0;
}

// Only run_cuda_kernel.cpp calls these.

EXPORTED int cuDeviceGetCount(int * n) { *n = 1; return 0; }
EXPORTED int cuDeviceGet(int * device, int) { *device = 0; return 0; }
EXPORTED int cuDeviceGetName(char * name, int size, int) { strncpy(name, "fake device", size_t(size)); return 0; }
EXPORTED int cuDeviceGetPCIBusId(char * id, int size, int) { strncpy(id, state.bus_id.c_str(), size_t(size)); return 0; }
EXPORTED int cuMemAlloc_v2(void ** p, size_t bytes) { *p = aligned_alloc(256, (bytes + 255) / 256 * 256); return *p ? 0 : 2; }
EXPORTED int cuMemFree_v2(void * p) { free(p); return 0; }
EXPORTED int cuMemcpyHtoD_v2(void * to, const void * from, size_t bytes) { memcpy(to, from, bytes); return 0; }
EXPORTED int cuMemcpyDtoH_v2(void * to, const void * from, size_t bytes) { memcpy(to, from, bytes); return 0; }
