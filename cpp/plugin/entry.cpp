// The entry point that ggml's loader calls, and the report that HYBRID_MOE_STATS asks for at the end of the process.
#include "moe/expert_copy.h"
#include "moe/expert_matmul.h"
#include "plugin/device.h"
#include "plugin/settings.h"
#include "threads/placement.h"

#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

// One JSON object per process, so that hosts whose log says little can be asked whether their experts ran here.
FILE *      stats_file = nullptr;
std::string ggml_version;

void append_stats() {
    const Counters c = counters();
    fprintf(stats_file,
            "{\"pid\": %d, \"ggml\": \"%s\", \"isa\": \"%s\", \"layers\": %" PRIu64 ", \"matmuls\": %" PRIu64
            ", \"rows\": %" PRIu64 ", \"weight_bytes\": %" PRIu64 ", \"dot_experts\": %" PRIu64 ", \"gemm_experts\": %" PRIu64 ", \"copies\": %s}\n",
            int(getpid()), ggml_version.c_str(), settings().kernels->name, c.n_layers, c.n_matmuls, c.n_rows,
            c.weight_bytes, c.n_dot_experts, c.n_gemm_experts, describe_copies(true).c_str());
    fclose(stats_file);
}

// Opened now, so that a path that cannot be written is said before the work and not after it. Returns a sentence or "".
std::string open_stats() {
    const char * path = getenv("HYBRID_MOE_STATS");
    if (!path || !*path) return std::string();
    stats_file = fopen(path, "ae");
    if (!stats_file) return std::string("hybrid-moe: HYBRID_MOE_STATS=") + path + " cannot be written: " + strerror(errno);
    keep_last_description();
    ggml_version = host().ggml_version();  // the host's library may be gone by then
    atexit(append_stats);
    return std::string();
}

ggml_backend_reg_t start(const void * caller) {
    std::string sentence = bind_host(caller);
    if (sentence.empty()) sentence = read_settings();
    if (!sentence.empty()) return refuse(sentence);
    if (host().ggml_backend_dev_by_name && host().ggml_backend_dev_by_name(device_name)) {
        return refuse("hybrid-moe: this host has loaded the plug-in already; once is enough");
    }
    if (loaded_before()) return refuse("hybrid-moe: the plug-in serves one ggml per process, and another one has it");
    sentence = open_stats();
    if (!sentence.empty()) return refuse(sentence);
    last_refusal.clear();
    set_trouble_listener([](const char * trouble) { host().log(GGML_LOG_LEVEL_WARN, "hybrid-moe: %s\n", trouble); });
    return registry();
}

}  // namespace

const std::string & refusal_sentence() { return last_refusal; }

}  // namespace hybrid_moe

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    return hybrid_moe::start(__builtin_return_address(0));
}
