// One unit of a device that does one thing at a time (a link direction, or the compute units), shared by all instances.
#pragma once

#include "clock.h"

#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

namespace simgpu {

struct Interval {
    int64_t begin;  // [ns]
    int64_t end;
};

// Time during which both lists are busy. Each list is sorted and free of overlaps, as Engine::Account has it.
int64_t overlap_ns(const std::vector<Interval> & a, const std::vector<Interval> & b);

class Engine {
public:
    struct Account {
        int64_t n           = 0;
        int64_t modelled_ns = 0;  // what the model says
        int64_t busy_ns     = 0;  // what was charged: the model, or the host's real time where that was longer
        int64_t n_overruns  = 0;  // how often it was longer
        int64_t overrun_ns  = 0;
        std::vector<Interval> busy;
    };

    // Does `work` (may be empty) alone on this engine, and charges max(modelled_ns, its real time), beginning when both
    // `ready` has come and the engine is free. Returns the end of the charge; the caller sleeps until then.
    int64_t charge(int64_t ready, int64_t modelled_ns, const std::function<void()> & work);

    // The same on two engines at once, such as the two links of a copy between devices.
    static int64_t charge_both(Engine & a, Engine & b, int64_t ready, int64_t modelled_ns, const std::function<void()> & work);

    Account account() const;
    void    reset();

private:
    void note(int64_t begin, int64_t end, int64_t modelled_ns);

    mutable std::mutex mutex_;
    int64_t free_at_ = 0;
    Account account_;
};

}  // namespace simgpu
