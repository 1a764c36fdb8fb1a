// llama.cpp's log, as far as test-llama-archs.cpp uses it: to standard error.
#pragma once

#include "ggml.h"

#include <cstdio>

enum { LOG_LEVEL_ERROR = 1, LOG_LEVEL_DEBUG = 4 };

inline void common_log_set_verbosity_thold(int) {}
inline int common_log_get_verbosity(ggml_log_level level) { return level == GGML_LOG_LEVEL_ERROR ? LOG_LEVEL_ERROR : LOG_LEVEL_DEBUG; }
inline void * common_log_main() { return nullptr; }
inline void common_log_flush(void *) {}

#define LOG(...) fprintf(stderr, __VA_ARGS__)
#define LOG_INF(...) LOG(__VA_ARGS__)
#define LOG_ERR(...) LOG(__VA_ARGS__)
