// What tests see of the fake libcuda.so.1 (fake_cuda.cpp): what was called, what is alive, and what to let fail.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

struct FakeCuda {
    // What it pretends to be.
    int         version   = 12040;
    std::string bus_id    = "0000:01:00.0";
    bool        pins_read_only = true;
    int         refused_images = 0;        // that many module loads fail as on a driver older than the image
    int         fail_call = 0;             // the n-th call from now on fails (the first is 1)
    int         fail_with = 2;             // CUDA_ERROR_OUT_OF_MEMORY

    // What happened.
    std::vector<std::string>     calls;    // names, arguments where a test looks at them
    std::vector<std::string>     misuse;   // calls that the real driver would not have allowed
    std::string                  failed;   // the call that fail_call hit

    // What is alive.
    bool                         started  = false;
    int                          retained = 0;
    int                          modules  = 0;
    int                          streams  = 0;
    std::vector<const void *>    stack;    // current contexts, the last is on top
    std::map<const char *, size_t> pinned;

    bool nothing_alive() const { return retained == 0 && modules == 0 && streams == 0 && stack.empty() && pinned.empty(); }
};

// Exported by the library: its one state. Assign FakeCuda{} to begin anew.
extern "C" FakeCuda & fake_cuda();
