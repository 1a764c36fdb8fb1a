// measure_team: work is a count of pauses, not a span of time, so that a thread that loses its CPU is late.
#include "threads/measure_team.h"

#include "threads/team.h"

#include <chrono>

namespace hybrid_moe {
namespace {

using Clock = std::chrono::steady_clock;

double us_since(Clock::time_point start) { return std::chrono::duration<double, std::micro>(Clock::now() - start).count(); }

void pause_often(void * context, int, int) {
    for (long i = *static_cast<const long *>(context); i > 0; i--) relax();
}

// The fastest of several: others may be using the CPU.
double pauses_per_us() {
    long n = 20000;
    double best = 0;
    for (int i = 0; i < 20; i++) {
        const Clock::time_point start = Clock::now();
        pause_often(&n, 0, 1);
        const double rate = double(n) / us_since(start);
        best = rate > best ? rate : best;
    }
    return best;
}

}  // namespace

bool measure_team(int n_threads, double gap_us, bool host_works, double work_us, int rounds, double * out) {
    static const double per_us = pauses_per_us();
    long gap = long(gap_us * per_us);
    long work = long(work_us * per_us);
    for (int i = 0; i < rounds; i++) {
        if (host_works) {
            if (!run_on_host_team(n_threads, pause_often, &gap)) return false;
        } else {
            pause_often(&gap, 0, 1);
        }
        const Clock::time_point start = Clock::now();
        run_team(n_threads, pause_often, &work);
        out[i] = us_since(start);
    }
    return true;
}

}  // namespace hybrid_moe
