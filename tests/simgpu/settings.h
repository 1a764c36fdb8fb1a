// What the simulated machine is like: read once, from SIMGPU_* (README.md has the table).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace simgpu {

struct Rate {  // [GB/s], which is bytes per nanosecond
    double up;    // host to device
    double down;  // device to host
};

// A fault that hits the n-th call (counted from 1), or every call from the n-th on. n = 0: never.
struct FaultAt {
    int64_t n       = 0;
    bool    onwards = false;
    bool hits(int64_t i) const { return n != 0 && (onwards ? i >= n : i == n); }
};

struct Stall {
    int64_t n  = 0;  // which op
    double  ms = 0;
};

struct DeviceSettings {
    double  memory_mib      = 1024;
    double  max_tensor_mib  = 0;  // larger tensors are refused; 0: no limit
    double  host_memory_mib = 0;  // what may be pinned; 0: no limit
    Rate    pinned          = {32, 32};
    Rate    pageable        = {12, 12};
    Rate    staged          = {10, 10};  // between devices, through a bounce buffer on the host
    double  latency_us      = 5;  // of every copy
    double  tflops          = 100;
    double  memory_gbps     = 1000;
    double  launch_us       = 2;  // of every op
    double  slow            = 1;  // factor on compute time
    int64_t offload_rows    = 32;  // from how many rows on it asks for ops whose weights lie on the host; 0: never
    FaultAt fail_alloc;
    FaultAt fail_host_alloc;
    FaultAt fail_copy;
    FaultAt lose_at;  // always onwards: a lost device stays lost
    Stall   stall;
};

struct Settings {
    int64_t n_devices       = 1;
    bool    moves_bytes     = true;  // copies arrive
    bool    computes        = true;  // ops have results
    int64_t n_threads       = 1;  // of the CPU back end that computes them
    bool    pageable_blocks = true;  // an async copy of pageable memory returns when it is done, as drivers have it
    bool    pinned_shared   = false;  // host memory pinned by one device is pinned for all
    bool    expands_fp8     = false;  // offers to make BF16 of FP8 codes
    bool    takes_experts   = false;  // offers a device that charges the CPU stage for experts
    double  cpu_gbps        = 100;  // of the timing-only expert stage
    double  cpu_tflops      = 2;
    std::vector<DeviceSettings> devices;
};

const Settings & settings();

// Fills settings(). Empty, or one sentence naming the variable, its value and the rule.
std::string read_settings();

}  // namespace simgpu
