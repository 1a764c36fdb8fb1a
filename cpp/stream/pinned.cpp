// The list of pinned ranges, and the two ways to pin.
#include "stream/pinned.h"

#include "cuda/cuda_device.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <shared_mutex>

namespace hybrid_moe {
namespace {

// Memory that CUDA pins is pinned for all of its devices. CUDA's pieces end here (cuda_device.h).
constexpr size_t piece_bytes = size_t(2) << 30;

struct Range {
    uintptr_t   end;
    std::string family;
    std::string device;  // empty: all of the family
};

struct Ranges {
    std::shared_mutex          mutex;
    std::map<uintptr_t, Range> by_begin;
    uint64_t                   n_bytes = 0;
};

Ranges & ranges() {
    static Ranges * r = new Ranges;  // threads may ask until the process ends
    return *r;
}

void note(const void * begin, size_t n_bytes, const std::string & family, const std::string & device) {
    const std::unique_lock<std::shared_mutex> lock(ranges().mutex);
    ranges().by_begin[uintptr_t(begin)] = {uintptr_t(begin) + n_bytes, family, device};
    ranges().n_bytes += n_bytes;
}

void forget(const void * begin) {
    const std::unique_lock<std::shared_mutex> lock(ranges().mutex);
    const auto i = ranges().by_begin.find(uintptr_t(begin));
    if (i == ranges().by_begin.end()) return;
    ranges().n_bytes -= i->second.end - i->first;
    ranges().by_begin.erase(i);
}

// With the lock held: the range that holds `data`; null when there is none.
const Range * range_at(const void * data) {
    auto i = ranges().by_begin.upper_bound(uintptr_t(data));
    if (i == ranges().by_begin.begin()) return nullptr;
    --i;
    return uintptr_t(data) < i->second.end ? &i->second : nullptr;
}

// The process's one way to CUDA's driver; one thread at a time.
struct CudaPins {
    std::mutex                  mutex;
    std::unique_ptr<CudaDevice> device;
    bool                        is_tried = false;
    std::string                 why;
};

CudaPins & cuda_pins() {
    static CudaPins * c = new CudaPins;
    return *c;
}

bool is_cuda(const Gpu & gpu) { return gpu.family == "CUDA"; }

bool register_with_cuda(const Gpu & gpu, const void * begin, size_t n_bytes, bool read_only, std::string & why) {
    CudaPins & c = cuda_pins();
    const std::lock_guard<std::mutex> lock(c.mutex);
    if (!c.is_tried) c.device = open_cuda_device(gpu.id.c_str(), c.why);
    c.is_tried = true;
    if (!c.device) {
        why = c.why;
        return false;
    }
    if (!c.device->register_host(begin, n_bytes, read_only, why)) return false;
    note(begin, n_bytes, gpu.family, "");
    return true;
}

void unregister_with_cuda(const void * begin) {
    CudaPins & c = cuda_pins();
    const std::lock_guard<std::mutex> lock(c.mutex);
    forget(begin);
    std::string why;  // the memory goes anyway
    c.device->unregister_host(begin, why);
}

// Owners of what is pinned: they end it.
struct Registered {
    explicit Registered(const void * b) : begin(b) {}
    ~Registered() { unregister_with_cuda(begin); }
    const void * begin;
};

struct RegisteredArena {
    RegisteredArena(size_t n_bytes, int node) : arena(n_bytes, node) {}
    Arena                       arena;
    std::unique_ptr<Registered> registered;  // ends before the arena
};

struct AllocatedArena {
    AllocatedArena(const Gpu & gpu, size_t n_bytes) : memory(gpu, n_bytes) {
        if (memory.is_pinned()) note(memory.data(), n_bytes, gpu.family, gpu.name);
    }
    ~AllocatedArena() {
        if (memory.is_pinned()) forget(memory.data());
    }
    HostMemory memory;
};

bool is_within(uint64_t budget, size_t n_bytes, std::string & why) {
    if (pinned_bytes() + n_bytes <= budget) return true;
    why = "the budget of " + std::to_string(budget >> 20) + " MiB of pinned memory is used up";
    return false;
}

}  // namespace

Pinned is_pinned_for(const Gpu & gpu, const void * data, size_t n_bytes) {
    const std::shared_lock<std::shared_mutex> lock(ranges().mutex);
    const Range * r = range_at(data);
    if (!r || uintptr_t(data) + n_bytes > r->end || r->family != gpu.family) return Pinned::no;
    return r->device.empty() || r->device == gpu.name ? Pinned::yes : Pinned::for_another;
}

size_t bytes_in_one_pin(const void * data, size_t n_bytes) {
    CudaPins & c = cuda_pins();
    const std::lock_guard<std::mutex> lock(c.mutex);
    const size_t n = c.device ? c.device->pinned_bytes_from(data) : 0;
    return n ? std::min(n, n_bytes) : n_bytes;
}

uint64_t pinned_bytes() {
    const std::shared_lock<std::shared_mutex> lock(ranges().mutex);
    return ranges().n_bytes;
}

std::unique_ptr<Arena> pinned_arena(const std::vector<Gpu> & gpus, size_t n_bytes, int node, uint64_t budget, std::string & why) {
    if (gpus.empty()) why = "there is no device to pin it for";
    if (gpus.empty() || !is_within(budget, n_bytes, why)) return nullptr;
    for (const Gpu & gpu : gpus) {
        if (!is_cuda(gpu)) continue;
        auto owner = std::make_shared<RegisteredArena>(n_bytes, node);
        uint8_t * data = owner->arena.data();
        if (!register_with_cuda(gpu, data, owner->arena.size(), false, why)) break;
        owner->registered = std::make_unique<Registered>(data);
        return std::make_unique<Arena>(data, n_bytes, node, std::move(owner));
    }
    for (const Gpu & gpu : gpus) {
        auto owner = std::make_shared<AllocatedArena>(gpu, n_bytes);
        if (!owner->memory.is_pinned()) continue;
        uint8_t * data = owner->memory.data();
        return std::make_unique<Arena>(data, n_bytes, -1, std::move(owner));
    }
    if (why.empty()) why = "no device pins " + std::to_string(n_bytes >> 20) + " MiB";
    return nullptr;
}

std::shared_ptr<void> pin_in_place(const std::vector<Gpu> & gpus, const void * data, size_t n_bytes, bool read_only, uint64_t budget,
                                   std::string & why) {
    const uintptr_t page  = uintptr_t(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = (uintptr_t(data) + page - 1) / page * page;
    const uintptr_t end   = (uintptr_t(data) + n_bytes) / page * page;
    why = "no CUDA device: others pin only memory of their own";
    for (const Gpu & gpu : gpus) {
        if (!is_cuda(gpu) || begin >= end) continue;
        if (!is_within(budget, end - begin, why)) return nullptr;
        const void * at = reinterpret_cast<const void *>(begin);
        if (register_with_cuda(gpu, at, end - begin, read_only, why)) return std::make_shared<Registered>(at);
        return nullptr;
    }
    return nullptr;
}

}  // namespace hybrid_moe
