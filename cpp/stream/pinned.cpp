// The list of pinned ranges.
#include "stream/pinned.h"

#include <map>
#include <mutex>
#include <shared_mutex>

namespace hybrid_moe {
namespace {

struct Range {
    uintptr_t   end;
    std::string family, device;
};

struct Ranges {
    std::shared_mutex           mutex;
    std::map<uintptr_t, Range>  by_begin;
};

Ranges & ranges() {
    static Ranges * r = new Ranges;  // threads may ask until the process ends
    return *r;
}

}  // namespace

void note_pinned(const std::string & family, const std::string & device, const void * begin, size_t n_bytes) {
    const std::unique_lock<std::shared_mutex> lock(ranges().mutex);
    ranges().by_begin[uintptr_t(begin)] = {uintptr_t(begin) + n_bytes, family, device};
}

void forget_pinned(const void * begin) {
    const std::unique_lock<std::shared_mutex> lock(ranges().mutex);
    ranges().by_begin.erase(uintptr_t(begin));
}

bool is_pinned_for(const Gpu & gpu, const void * data, size_t n_bytes) {
    const std::shared_lock<std::shared_mutex> lock(ranges().mutex);
    auto i = ranges().by_begin.upper_bound(uintptr_t(data));
    if (i == ranges().by_begin.begin()) return false;
    const Range & r = (--i)->second;
    return uintptr_t(data) + n_bytes <= r.end && r.family == gpu.family && (r.device.empty() || r.device == gpu.name);
}

}  // namespace hybrid_moe
