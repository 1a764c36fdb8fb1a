// Time as the simulated machine sees it: nanoseconds of the monotonic clock, and sleeping until one of them.
#pragma once

#include <sys/prctl.h>
#include <time.h>

#include <cerrno>
#include <cstdint>

namespace simgpu {

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

// A deadline, not a duration: a thread that was woken late has that much less to sleep next time.
inline void sleep_until(int64_t ns) {
    const timespec t = {time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, nullptr) == EINTR) {}
}

// Linux lets a thread's timers be 50 us late to save power; our own threads ask for none of that.
inline void ask_for_sharp_timers() { prctl(PR_SET_TIMERSLACK, 1UL); }

}  // namespace simgpu
