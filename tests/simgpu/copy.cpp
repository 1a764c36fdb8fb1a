// Which links a copy takes, for how long, and what a failing one leaves behind.
#include "copy.h"

#include "pinned.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace simgpu {
namespace {

// A copy function of ggml returns nothing, so a failure shows in two ways: the target holds bytes that read as NaN, and
// the device's next graph_compute fails.
constexpr uint8_t poison = 0xFF;

bool count_and_judge(Device & device) {
    const int64_t i_copy = ++device.n_copies;
    const bool by_fault = device.settings.fail_copy.hits(i_copy);
    if (!device.lost && !by_fault) return false;
    if (by_fault) complain(device, "copy " + std::to_string(i_copy) + " fails, as SIMGPU_FAIL_COPY has it");
    device.n_failed_copies++;
    device.has_error = true;
    return true;
}

double rate_of(const Rate & rate, bool is_up) { return is_up ? rate.up : rate.down; }

double gbps(const Copy & copy) {
    if (copy.from && copy.to) return std::min(copy.from->settings.staged.down, copy.to->settings.staged.up);
    const DeviceSettings & s = (copy.to ? copy.to : copy.from)->settings;
    return rate_of(copy.kind == copy_pinned ? s.pinned : s.pageable, copy.to != nullptr);
}

int64_t memory_ns(const Device & device, double n_bytes) {
    return std::llround(device.settings.launch_us * 1e3 + n_bytes / device.settings.memory_gbps);
}

bool within_one(const Copy & copy) { return copy.from == copy.to; }

void move_bytes(const Copy & copy) {
    if (copy.fails) memset(copy.target, poison, copy.size);
    else memmove(copy.target, copy.source, copy.size);
}

}  // namespace

Copy plan_upload(Device & device, uint8_t * target, const void * source, size_t size) {
    const CopyKind kind = is_pinned_for(device, source, size) ? copy_pinned : copy_pageable;
    return {nullptr, &device, target, static_cast<const uint8_t *>(source), size, kind, count_and_judge(device)};
}

Copy plan_download(Device & device, void * target, const uint8_t * source, size_t size) {
    const CopyKind kind = is_pinned_for(device, target, size) ? copy_pinned : copy_pageable;
    return {&device, nullptr, static_cast<uint8_t *>(target), source, size, kind, count_and_judge(device)};
}

Copy plan_between(Device & from, const uint8_t * source, Device & to, uint8_t * target, size_t size) {
    const bool from_fails = count_and_judge(from);
    const bool to_fails   = &to != &from && count_and_judge(to);
    return {&from, &to, target, source, size, copy_staged, from_fails || to_fails};
}

int64_t modelled_ns(const Copy & copy) {
    if (within_one(copy)) return memory_ns(*copy.to, 2.0 * double(copy.size));  // read and written
    double latency_us = 0;
    for (const Device * device : {copy.from, copy.to}) latency_us += device ? device->settings.latency_us : 0;
    return std::llround(latency_us * 1e3 + double(copy.size) / gbps(copy));
}

int64_t do_copy(const Copy & copy, int64_t ready) {
    std::function<void()> work;
    if (settings().moves_bytes) work = [&copy] { move_bytes(copy); };
    const int64_t ns = modelled_ns(copy);
    if (within_one(copy)) return copy.to->compute.charge(ready, ns, work);
    if (copy.to) copy.to->up_bytes.of_kind[copy.kind] += int64_t(copy.size);
    if (copy.from) copy.from->down_bytes.of_kind[copy.kind] += int64_t(copy.size);
    if (copy.from && copy.to) return Engine::charge_both(copy.from->down, copy.to->up, ready, ns, work);
    return copy.to ? copy.to->up.charge(ready, ns, work) : copy.from->down.charge(ready, ns, work);
}

void copy_now(const Copy & copy) { sleep_until(do_copy(copy, now_ns())); }

void fill_now(Device & device, size_t size, const std::function<void()> & fill) {
    const std::function<void()> work = settings().moves_bytes ? fill : nullptr;
    sleep_until(device.compute.charge(now_ns(), memory_ns(device, double(size)), work));
}

}  // namespace simgpu
