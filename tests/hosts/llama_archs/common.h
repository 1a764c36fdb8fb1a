// What llama.cpp's test-llama-archs.cpp needs of its own common library, for compiling that file alone. Writing models is
// all it is used for: batches, which only its comparison of back ends fills, are not here.
#pragma once

#include "llama.h"

#include <cstdint>
#include <cstdlib>

inline void common_init() {}

struct common_batch {
    explicit common_batch(llama_context *) {}
    void clear() { abort(); }
    void add(llama_token, llama_pos, llama_seq_id, bool) { abort(); }
    decltype(llama_batch_ext_init(nullptr)) get() { abort(); }
};
