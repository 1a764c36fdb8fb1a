// Copies: planned when they are called (which is when faults count them), done and charged when their turn comes.
#pragma once

#include "sim_device.h"

#include <cstddef>
#include <cstdint>
#include <functional>

namespace simgpu {

struct Copy {
    Device *        from   = nullptr;  // null: the host
    Device *        to     = nullptr;  // null: the host
    uint8_t *       target = nullptr;
    const uint8_t * source = nullptr;
    size_t          size   = 0;
    CopyKind        kind   = copy_pageable;
    bool            fails  = false;
};

Copy plan_upload(Device & device, uint8_t * target, const void * source, size_t size);
Copy plan_download(Device & device, void * target, const uint8_t * source, size_t size);
Copy plan_between(Device & from, const uint8_t * source, Device & to, uint8_t * target, size_t size);

// What the model charges: latency + size / rate.
int64_t modelled_ns(const Copy & copy);

// Does it, as soon as `ready` has come and the links are free; returns the end of the charge, until which the caller sleeps.
int64_t do_copy(const Copy & copy, int64_t ready);

// For calls that return when the copy is done.
void copy_now(const Copy & copy);

// Fills `size` bytes of device memory with `fill`; charged to the compute units, which write them.
void fill_now(Device & device, size_t size, const std::function<void()> & fill);

}  // namespace simgpu
