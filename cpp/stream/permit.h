// What long batches may use at the moment: which of the streaming devices, and whether the CPU computes a part. An engine says
// so while its decode has priority; it is read at every layer, and at every expert that a device takes. Decides nothing itself.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace hybrid_moe {

class Permit {
public:
    static constexpr size_t max_devices = 63;  // those beyond are always permitted

    // `devices`: bit i for device i of Streams.
    void set(uint64_t devices, bool cpu) { bits_.store((devices & ~cpu_bit) | (cpu ? cpu_bit : 0), std::memory_order_relaxed); }
    bool has_device(size_t i) const { return i >= max_devices || (bits_.load(std::memory_order_relaxed) >> i & 1); }
    bool has_cpu() const { return bits_.load(std::memory_order_relaxed) & cpu_bit; }

private:
    static constexpr uint64_t cpu_bit = uint64_t(1) << 63;
    std::atomic<uint64_t> bits_{~uint64_t(0)};
};

// Of the process.
inline Permit & permit() {
    static Permit p;
    return p;
}

// Whether the batches of this thread have priority: they wait for no device that others stream to, and no permit binds them.
inline bool & this_thread_is_first() {
    thread_local bool is_first = false;
    return is_first;
}

}  // namespace hybrid_moe
