// The functions of NVIDIA's driver library that we call, declared by us and found at run time: no CUDA header is read and no
// CUDA library is linked. Names and values are those of the CUDA driver API documentation, version 11.0 on.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace hybrid_moe {

using CudaResult = int;  // CUresult; 0 is success
using CudaHandle = struct CudaOpaque *;  // CUcontext, CUmodule, CUfunction, CUstream

constexpr int cuda_attribute_read_only_host_register = 113;  // CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
constexpr unsigned cuda_stream_non_blocking      = 1;        // CU_STREAM_NON_BLOCKING: does not wait for the default stream
constexpr unsigned cuda_host_register_portable   = 1;        // CU_MEMHOSTREGISTER_PORTABLE: pinned for all contexts
constexpr unsigned cuda_host_register_read_only  = 8;        // CU_MEMHOSTREGISTER_READ_ONLY

// One line per function: member, symbol, parameters. Where cuda.h renames a function to _v2, the symbol is that of the _v2.
#define HYBRID_MOE_CUDA_FUNCTIONS(X)                                                                        \
    X(driver_get_version, "cuDriverGetVersion", (int * version))                                            \
    X(init, "cuInit", (unsigned flags))                                                                     \
    X(get_error_name, "cuGetErrorName", (CudaResult error, const char ** name))                             \
    X(device_get_by_pci_bus_id, "cuDeviceGetByPCIBusId", (int * device, const char * pci_bus_id))           \
    X(device_get_attribute, "cuDeviceGetAttribute", (int * value, int attribute, int device))               \
    X(primary_context_retain, "cuDevicePrimaryCtxRetain", (CudaHandle * context, int device))               \
    X(primary_context_release, "cuDevicePrimaryCtxRelease_v2", (int device))                                \
    X(context_push, "cuCtxPushCurrent_v2", (CudaHandle context))                                            \
    X(context_pop, "cuCtxPopCurrent_v2", (CudaHandle * context))                                            \
    X(module_load_data, "cuModuleLoadData", (CudaHandle * module, const void * image))                      \
    X(module_get_function, "cuModuleGetFunction", (CudaHandle * function, CudaHandle module, const char * name)) \
    X(module_unload, "cuModuleUnload", (CudaHandle module))                                                 \
    X(stream_create, "cuStreamCreate", (CudaHandle * stream, unsigned flags))                               \
    X(stream_synchronize, "cuStreamSynchronize", (CudaHandle stream))                                       \
    X(stream_destroy, "cuStreamDestroy_v2", (CudaHandle stream))                                            \
    X(mem_host_register, "cuMemHostRegister_v2", (void * begin, size_t bytes, unsigned flags))              \
    X(mem_host_unregister, "cuMemHostUnregister", (void * begin))                                           \
    X(launch_kernel, "cuLaunchKernel",                                                                      \
      (CudaHandle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, \
       unsigned block_z, unsigned shared_bytes, CudaHandle stream, void ** parameters, void ** extra))

struct CudaDriver {
#define HYBRID_MOE_DECLARE(member, symbol, parameters) CudaResult(*member) parameters = nullptr;
    HYBRID_MOE_CUDA_FUNCTIONS(HYBRID_MOE_DECLARE)
#undef HYBRID_MOE_DECLARE
    int version = 0;  // newest CUDA version that the driver serves: 1000 x major + 10 x minor

    // Such as "cuInit failed: CUDA_ERROR_NO_DEVICE".
    std::string failure(const char * symbol, CudaResult result) const;
};

std::string cuda_version_text(int version);  // "12.4" for 12040

// Opens the library, checks its version and starts it; once started it is never closed, for it may have threads. Null with
// a sentence in `why` when there is none, it is too old, or it finds no device.
std::unique_ptr<const CudaDriver> load_cuda_driver(const char * library, std::string & why);

}  // namespace hybrid_moe
