// The entry point that ggml's loader calls.
#include "handles.h"
#include "plugin/host.h"

#include <cstdio>
#include <string>

namespace simgpu {
namespace {

ggml_backend_reg_t refuse(const std::string & sentence) {
    if (hybrid_moe::host().log) hybrid_moe::host().log(GGML_LOG_LEVEL_ERROR, "%s\n", sentence.c_str());
    else fprintf(stderr, "%s\n", sentence.c_str());  // there is no host to log to
    return nullptr;
}

// Graphs are read with the pinned release's own header, which has no promise of a stable layout as the vtables have.
bool has_pinned_graphs(const char * version) { return std::string(version).rfind("0.25.", 0) == 0; }

ggml_backend_reg_t start(const void * caller) {
    if (n_devices() > 0) return refuse("simgpu: loaded already; once is enough");
    std::string sentence = hybrid_moe::bind_host(caller);
    if (sentence.empty() && !has_pinned_graphs(hybrid_moe::host().ggml_version())) {
        sentence = std::string("simgpu: this host's ggml is ") + hybrid_moe::host().ggml_version() +
                   ", and only 0.25 has been tried; use llama-cpp-python 0.3.36";
    }
    if (sentence.empty() && (!hybrid_moe::host().ggml_backend_dev_by_name || !cpu_handle())) {
        sentence = "simgpu: this host has no device named CPU, which computes for us; load its CPU back end first";
    }
    if (sentence.empty()) sentence = read_settings();
    if (!sentence.empty()) return refuse(sentence);
    make_devices();
    return registry();
}

}  // namespace
}  // namespace simgpu

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    return simgpu::start(__builtin_return_address(0));
}
