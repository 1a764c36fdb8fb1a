// The list of devices, their budgets, and what they say when they fail.
#include "sim_device.h"

#include "plugin/host.h"

#include <algorithm>
#include <memory>
#include <vector>

namespace simgpu {
namespace {

// Never destroyed: instances that a host forgot to free may still be working when the process ends.
std::vector<std::unique_ptr<Device>> & devices() {
    static auto & all = *new std::vector<std::unique_ptr<Device>>;
    return all;
}

}  // namespace

bool Budget::take(size_t n) {
    const std::lock_guard lock(mutex_);
    if (total_ != 0 && n > total_ - used_) return false;
    used_ += n;
    peak_ = std::max(peak_, used_);
    return true;
}

void Budget::give_back(size_t n) {
    const std::lock_guard lock(mutex_);
    used_ -= n;
}

size_t Budget::used() const {
    const std::lock_guard lock(mutex_);
    return used_;
}

size_t Budget::peak() const {
    const std::lock_guard lock(mutex_);
    return peak_;
}

void make_devices() {
    for (const DeviceSettings & of_device : settings().devices) {
        auto device = std::make_unique<Device>();
        device->index    = int(devices().size());
        device->name     = "SimGPU" + std::to_string(device->index);
        device->settings = of_device;
        device->memory.set_total(std::max<size_t>(1, size_t(of_device.memory_mib * 1024 * 1024)));  // 0 would be no limit
        device->host_memory.set_total(size_t(of_device.host_memory_mib * 1024 * 1024));
        devices().push_back(std::move(device));
    }
}

size_t n_devices() { return devices().size(); }

Device & device_at(size_t i) { return *devices().at(i); }

void complain(const Device & device, const std::string & sentence) {
    hybrid_moe::host().log(GGML_LOG_LEVEL_ERROR, "simgpu: %s: %s\n", device.name.c_str(), sentence.c_str());
}

void lose(Device & device) {
    if (!device.lost.exchange(true)) complain(device, "lost, as SIMGPU_LOSE_AT has it");
}

}  // namespace simgpu
