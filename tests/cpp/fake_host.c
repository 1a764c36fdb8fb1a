// A process with a ggml that is too old, too new, or lacks a symbol: just enough of one to be asked. Build with
// -DVERSION="..." and -DWITHOUT_LOG for the last case; argv[1] is the plug-in. Prints what ggml_backend_init returned.
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>

const char * ggml_version(void) { return VERSION; }
void ggml_backend_buffer_init(void) {}
void ggml_graph_n_nodes(void) {}
void ggml_graph_node(void) {}
void ggml_nbytes(void) {}
void ggml_op_name(void) {}
void ggml_type_name(void) {}
void * ggml_backend_dev_by_name(const char * name) { (void) name; return 0; }
#ifndef WITHOUT_LOG
void ggml_log_internal(int level, const char * format, ...) {
    va_list arguments;
    va_start(arguments, format);
    (void) level;
    vprintf(format, arguments);
    va_end(arguments);
}
#endif

int main(int argc, char ** argv) {
    void * plugin = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : 0;
    if (!plugin) {
        printf("dlopen: %s\n", dlerror());
        return 1;
    }
    void * (*init)(void) = (void * (*)(void)) dlsym(plugin, "ggml_backend_init");
    for (int i = 0; i < 2; i++) printf("init %d: %s\n", i, init() ? "loaded" : "refused");
    return 0;
}
