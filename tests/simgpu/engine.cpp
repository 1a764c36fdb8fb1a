// Engines: who may begin when, and the books.
#include "engine.h"

#include <algorithm>

namespace simgpu {
namespace {

int64_t real_ns_of(const std::function<void()> & work) {
    if (!work) return 0;
    const int64_t begin = now_ns();
    work();
    return now_ns() - begin;
}

}  // namespace

int64_t overlap_ns(const std::vector<Interval> & a, const std::vector<Interval> & b) {
    int64_t sum = 0;
    for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
        sum += std::max<int64_t>(0, std::min(a[i].end, b[j].end) - std::max(a[i].begin, b[j].begin));
        (a[i].end < b[j].end ? i : j)++;
    }
    return sum;
}

// `begin` may lie a little in the past: a thread that was woken late takes its turn where the model has it, so the host's
// jitter does not add up. The mutex is held while working, so real work of two instances does not share the engine either.
int64_t Engine::charge(int64_t ready, int64_t modelled_ns, const std::function<void()> & work) {
    const std::lock_guard lock(mutex_);
    const int64_t begin = std::max(ready, free_at_);
    const int64_t end   = begin + std::max(modelled_ns, real_ns_of(work));
    note(begin, end, modelled_ns);
    return end;
}

int64_t Engine::charge_both(Engine & a, Engine & b, int64_t ready, int64_t modelled_ns, const std::function<void()> & work) {
    const std::scoped_lock lock(a.mutex_, b.mutex_);
    const int64_t begin = std::max({ready, a.free_at_, b.free_at_});
    const int64_t end   = begin + std::max(modelled_ns, real_ns_of(work));
    a.note(begin, end, modelled_ns);
    b.note(begin, end, modelled_ns);
    return end;
}

void Engine::note(int64_t begin, int64_t end, int64_t modelled_ns) {
    free_at_ = end;
    account_.n++;
    account_.modelled_ns += modelled_ns;
    account_.busy_ns += end - begin;
    if (end - begin > modelled_ns) {
        account_.n_overruns++;
        account_.overrun_ns += end - begin - modelled_ns;
    }
    if (!account_.busy.empty() && account_.busy.back().end == begin) account_.busy.back().end = end;
    else if (end > begin) account_.busy.push_back({begin, end});
}

Engine::Account Engine::account() const {
    const std::lock_guard lock(mutex_);
    return account_;
}

void Engine::reset() {
    const std::lock_guard lock(mutex_);
    account_ = {};
}

}  // namespace simgpu
