// One simulated device: its engines, its memory accounts, its faults. Shared by all instances, for the life of the process.
#pragma once

#include "engine.h"
#include "settings.h"

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

namespace simgpu {

// Where the host's end of a copy lies.
enum CopyKind { copy_pinned, copy_pageable, copy_staged, n_copy_kinds };

struct LinkBytes {
    std::atomic<int64_t> of_kind[n_copy_kinds] = {};
};

// Bytes that may be held, and are.
class Budget {
public:
    void set_total(size_t total) { total_ = total; }  // 0: no limit
    bool take(size_t n);
    void give_back(size_t n);
    size_t total() const { return total_; }
    size_t used() const;
    size_t peak() const;

private:
    mutable std::mutex mutex_;
    size_t total_ = 0;
    size_t used_  = 0;
    size_t peak_  = 0;
};

struct Device {
    int            index = 0;
    std::string    name;
    DeviceSettings settings;
    Engine         up;  // link, host to device
    Engine         down;
    Engine         compute;
    LinkBytes      up_bytes;
    LinkBytes      down_bytes;
    Budget         memory;
    Budget         host_memory;
    std::atomic<int64_t> n_allocs{0};  // calls so far, which faults are counted in
    std::atomic<int64_t> n_host_allocs{0};
    std::atomic<int64_t> n_copies{0};
    std::atomic<int64_t> n_ops{0};
    std::atomic<int64_t> n_failed_copies{0};
    std::atomic<bool>    lost{false};
    std::atomic<bool>    has_error{false};  // of an asynchronous operation; the next graph_compute reports it
};

void     make_devices();  // from settings(), once
size_t   n_devices();
Device & device_at(size_t i);

// Logs an error of this device to the host.
void complain(const Device & device, const std::string & sentence);

// Takes the device away for good: its allocations, copies and graphs fail from now on.
void lose(Device & device);

}  // namespace simgpu
