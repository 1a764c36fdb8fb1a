// Host binder: walks the objects loaded in this process and takes ggml's functions from the right ones.
#include "plugin/host.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace hybrid_moe {
namespace {

Host bound;

std::string folder_of(const std::string & path) {
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? std::string() : path.substr(0, slash);
}

// Every loaded object by path; the program itself is "". Objects next to the caller come first: a process may hold
// several ggmls, and they are installed as sets.
std::vector<std::string> loaded_objects(const void * caller) {
    std::vector<std::string> all;
    dl_iterate_phdr(
        [](dl_phdr_info * info, size_t, void * data) {
            static_cast<std::vector<std::string> *>(data)->push_back(info->dlpi_name ? info->dlpi_name : "");
            return 0;
        },
        &all);
    Dl_info where;
    std::string home;
    std::string self;
    if (caller && dladdr(caller, &where) && where.dli_fname) {
        self = where.dli_fname;
        home = folder_of(self);
    }
    std::vector<std::string> sorted;
    for (const std::string & path : all) {
        if (path == self) sorted.push_back(path);
    }
    for (const std::string & path : all) {
        if (path != self && !home.empty() && folder_of(path) == home) sorted.push_back(path);
    }
    for (const std::string & path : all) {
        if (path != self && (home.empty() || folder_of(path) != home)) sorted.push_back(path);
    }
    return sorted;
}

void * open_loaded(const std::string & path) {
    return dlopen(path.empty() ? nullptr : path.c_str(), RTLD_NOLOAD | RTLD_LAZY);
}

// dlsym also looks into an object's dependencies, so ask whether the symbol's own object is the one we mean.
void * symbol_in(void * object, const std::string & path, const char * name) {
    void * p = dlsym(object, name);
    Dl_info info;
    if (!p || path.empty() || !dladdr(p, &info) || !info.dli_fname) return p;
    return path == info.dli_fname ? p : nullptr;
}

template <class F> void take(void * object, const std::string & path, const char * name, F & to) {
    if (!to) to = reinterpret_cast<F>(symbol_in(object, path, name));
}

#define HYBRID_MOE_CHECK(name) \
    if (!h.name) return #name;

const char * missing(const Host & h) {
    HYBRID_MOE_HOST_FUNCTIONS(HYBRID_MOE_CHECK)
    return h.log ? nullptr : "ggml_log_internal";
}

}  // namespace

const Host & host() { return bound; }

const char * missing_for_streaming() {
    const Host & h = bound;
    HYBRID_MOE_STREAM_FUNCTIONS(HYBRID_MOE_CHECK)
    if (!h.ggml_backend_dev_by_name) return "ggml_backend_dev_by_name";
    if (!h.ggml_backend_dev_count) return "ggml_backend_dev_count";
    return h.ggml_backend_dev_get ? nullptr : "ggml_backend_dev_get";
}

std::string judge_host_version(const char * version, bool allow_untested) {
    int major = -1;
    int minor = -1;
    if (sscanf(version, "%d.%d", &major, &minor) != 2) {
        return std::string("hybrid-moe: this host's ggml calls itself '") + version + "', which is no version";
    }
    const bool too_old = major < oldest_host[0] || (major == oldest_host[0] && minor < oldest_host[1]);
    const bool too_new = major > newest_host[0] || (major == newest_host[0] && minor > newest_host[1]);
    if (!too_old && (!too_new || allow_untested)) return std::string();
    char text[256];
    snprintf(text, sizeof text, "hybrid-moe: this host's ggml %s is too %s (tried: %d.%d to %d.%d), so it runs without us; %s",
             version, too_old ? "old" : "new", oldest_host[0], oldest_host[1], newest_host[0], newest_host[1],
             too_old ? "update the host" : "update hybrid-moe-ext, or set HYBRID_MOE_UNTESTED_HOST=1 to try");
    return text;
}

std::string bind_host(const void * caller) {
    if (bound.log) return std::string();
    Host h;
    for (const std::string & path : loaded_objects(caller)) {
        void * object = open_loaded(path);
        if (!object) continue;
        // The object that holds ggml_backend_buffer_init is "the" ggml: the rest must come from it as well.
        if (!h.ggml_backend_buffer_init && symbol_in(object, path, "ggml_backend_buffer_init")) {
#define HYBRID_MOE_TAKE(name) take(object, path, #name, h.name);
            HYBRID_MOE_HOST_FUNCTIONS(HYBRID_MOE_TAKE)
            HYBRID_MOE_STREAM_FUNCTIONS(HYBRID_MOE_TAKE)
#undef HYBRID_MOE_TAKE
            take(object, path, "ggml_log_internal", h.log);
            h.library = path;
        }
        take(object, path, "ggml_backend_dev_by_name", h.ggml_backend_dev_by_name);
        take(object, path, "ggml_backend_dev_count", h.ggml_backend_dev_count);
        take(object, path, "ggml_backend_dev_get", h.ggml_backend_dev_get);
        dlclose(object);  // only the reference that RTLD_NOLOAD added
    }
    if (!h.ggml_backend_buffer_init) {
        return "hybrid-moe: no ggml found in this process, so there is nothing to plug into; a program that holds ggml "
               "itself must export it (link it with -rdynamic; in CMake -DCMAKE_ENABLE_EXPORTS=ON)";
    }
    if (!h.ggml_version) return judge_host_version("0.0 (no ggml_version)", false);
    const char * allow = getenv("HYBRID_MOE_UNTESTED_HOST");
    const std::string verdict = judge_host_version(h.ggml_version(), allow && !strcmp(allow, "1"));
    if (!verdict.empty()) return verdict;
    if (const char * name = missing(h)) {
        return "hybrid-moe: this host's ggml " + std::string(h.ggml_version()) + " (" + h.library + ") has no symbol " +
               name + ", so it runs without us; use a host with an unmodified ggml";
    }
    bound = h;
    return std::string();
}

}  // namespace hybrid_moe
