// NVIDIA's driver library, opened at run time.
#include "cuda/cuda_driver.h"

#include <dlfcn.h>

namespace hybrid_moe {
namespace {

constexpr int oldest_version = 11000;  // the first with cuDevicePrimaryCtxRelease_v2

template <typename Function> bool find(void * library, const char * symbol, Function & function) {
    function = reinterpret_cast<Function>(dlsym(library, symbol));
    return function != nullptr;
}

// Null, or the first symbol that is not there.
const char * bind_functions(void * library, CudaDriver & driver) {
#define HYBRID_MOE_BIND(member, symbol, parameters) \
    if (!find(library, symbol, driver.member)) return symbol;
    HYBRID_MOE_CUDA_FUNCTIONS(HYBRID_MOE_BIND)
#undef HYBRID_MOE_BIND
    return nullptr;
}

}  // namespace

std::string cuda_version_text(int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string CudaDriver::failure(const char * symbol, CudaResult result) const {
    const char * name = nullptr;
    if (get_error_name(result, &name) != 0 || name == nullptr) {
        return std::string(symbol) + " failed with the unknown CUDA error " + std::to_string(result);
    }
    return std::string(symbol) + " failed: " + name;
}

std::unique_ptr<const CudaDriver> load_cuda_driver(const char * library, std::string & why) {
    void * const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char * const reason = dlerror();
        why = std::string("NVIDIA's driver library ") + library + " cannot be opened: " + (reason ? reason : "no reason given");
        return nullptr;
    }
    const auto give_up = [&](const std::string & reason) {
        why = reason;
        dlclose(handle);
        return nullptr;
    };
    auto driver = std::make_unique<CudaDriver>();
    // The version first: an old driver is a better reason than the function it lacks.
    if (find(handle, "cuDriverGetVersion", driver->driver_get_version)) driver->driver_get_version(&driver->version);
    if (driver->version != 0 && driver->version < oldest_version) {
        return give_up(std::string(library) + " serves CUDA " + cuda_version_text(driver->version) + ", at least " +
                       cuda_version_text(oldest_version) + " is needed: update NVIDIA's driver");
    }
    if (const char * missing = bind_functions(handle, *driver)) {
        return give_up(std::string(library) + " has no function " + missing + ": update NVIDIA's driver");
    }
    if (const CudaResult r = driver->init(0)) {
        why = driver->failure("cuInit", r);
        return nullptr;
    }
    return driver;
}

}  // namespace hybrid_moe
