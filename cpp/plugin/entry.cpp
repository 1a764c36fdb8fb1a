// The entry point that ggml's loader calls.
#include "plugin/device.h"
#include "plugin/settings.h"

#include <cstdio>
#include <string>

namespace hybrid_moe {
namespace {

std::string last_refusal;

ggml_backend_reg_t refuse(const std::string & sentence) {
    last_refusal = sentence;
    if (host().log) {
        host().log(GGML_LOG_LEVEL_ERROR, "%s\n", sentence.c_str());
    } else {
        fprintf(stderr, "%s\n", sentence.c_str());  // there is no host to log to
    }
    return nullptr;  // the host goes on without us
}

bool loaded_before() {
    static bool loaded = false;
    const bool before = loaded;
    loaded = true;
    return before;
}

ggml_backend_reg_t start(const void * caller) {
    std::string sentence = bind_host(caller);
    if (sentence.empty()) sentence = read_settings();
    if (!sentence.empty()) return refuse(sentence);
    if (host().ggml_backend_dev_by_name && host().ggml_backend_dev_by_name(device_name)) {
        return refuse("hybrid-moe: this host has loaded the plug-in already; once is enough");
    }
    if (loaded_before()) return refuse("hybrid-moe: the plug-in serves one ggml per process, and another one has it");
    last_refusal.clear();
    return registry();
}

}  // namespace

const std::string & refusal_sentence() { return last_refusal; }

}  // namespace hybrid_moe

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    return hybrid_moe::start(__builtin_return_address(0));
}
