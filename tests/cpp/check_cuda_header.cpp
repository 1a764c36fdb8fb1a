// Our declarations of the driver API against NVIDIA's own header, where a CUDA toolkit is installed: what compiles, agrees.
#include "cuda/cuda_driver.h"

#include <cuda.h>

#include <cstdio>
#include <string_view>
#include <type_traits>

using namespace hybrid_moe;

namespace {

struct Name { std::string_view member, symbol; };
#define HYBRID_MOE_NAME(member, symbol, parameters) Name{#member, symbol},
constexpr Name names[] = {HYBRID_MOE_CUDA_FUNCTIONS(HYBRID_MOE_NAME)};

constexpr std::string_view symbol_of(std::string_view member) {
    for (const Name & name : names) {
        if (name.member == member) return name.symbol;
    }
    return "";
}

// The same in registers and memory: as many parameters, of the same sizes, pointers where pointers are.
template <typename R, typename... P, typename OurR, typename... OurP>
constexpr bool alike(R (*)(P...), OurR (*)(OurP...)) {
    if constexpr (sizeof...(P) != sizeof...(OurP)) return false;
    else return sizeof(R) == sizeof(OurR) &&
                ((sizeof(P) == sizeof(OurP) && std::is_pointer_v<P> == std::is_pointer_v<OurP>) && ...);
}

// Quoted after macros have been replaced: cuda.h defines cuCtxPushCurrent as cuCtxPushCurrent_v2, and so on.
#define QUOTED_NAME(function) #function
#define QUOTED(function) QUOTED_NAME(function)
#define SAME(member, function)                                                                                        \
    static_assert(symbol_of(#member) == QUOTED(function));                                                            \
    static_assert(alike(static_cast<decltype(&function)>(nullptr), static_cast<decltype(CudaDriver::member)>(nullptr)))

SAME(driver_get_version, cuDriverGetVersion);
SAME(init, cuInit);
SAME(get_error_name, cuGetErrorName);
SAME(device_get_by_pci_bus_id, cuDeviceGetByPCIBusId);
SAME(device_get_attribute, cuDeviceGetAttribute);
SAME(primary_context_retain, cuDevicePrimaryCtxRetain);
SAME(primary_context_release, cuDevicePrimaryCtxRelease);
SAME(context_push, cuCtxPushCurrent);
SAME(context_pop, cuCtxPopCurrent);
SAME(module_load_data, cuModuleLoadData);
SAME(module_get_function, cuModuleGetFunction);
SAME(module_unload, cuModuleUnload);
SAME(stream_create, cuStreamCreate);
SAME(stream_synchronize, cuStreamSynchronize);
SAME(stream_destroy, cuStreamDestroy);
SAME(mem_host_register, cuMemHostRegister);
SAME(mem_host_unregister, cuMemHostUnregister);
SAME(launch_kernel, cuLaunchKernel);
static_assert(sizeof names / sizeof *names == 18, "a function above for each that is used");

static_assert(cuda_attribute_read_only_host_register == CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED);
static_assert(cuda_stream_non_blocking == CU_STREAM_NON_BLOCKING);
static_assert(cuda_host_register_portable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(cuda_host_register_read_only == CU_MEMHOSTREGISTER_READ_ONLY);

}  // namespace

int main() {
    printf("cuda.h of CUDA %d.%d\n", CUDA_VERSION / 1000, CUDA_VERSION % 1000 / 10);
    return 0;
}
