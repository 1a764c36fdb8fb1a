// Our own threads, process-wide: they spin briefly after their work, then park. Who may use them when is turns.h's business.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace hybrid_moe {

using TeamFunction = void (*)(void * context, int i_thread, int n_threads);

// Where workers may run. The calling thread is the host's and is never pinned.
//   off        wherever this process may
//   automatic  on the CPUs of their NUMA node, when there are several, no CPU quota, and CPUs for all of them
//   on         each on a CPU of its own, in the order of topology.h, as far as there are CPUs
// Why automatic goes no further: docs/threads.md.
enum class PinMode { automatic, on, off };

class Pool {
public:
    // Calls f(context, i, n) for i in [0, n), n <= n_threads, i = 0 on this thread; returns when all have returned. May
    // be called by several threads at once: each gets workers of its own. Fewer threads when no more can be created.
    void run(int n_threads, TeamFunction f, void * context);

    // For workers created from now on.
    void set_pin_mode(PinMode mode) { pin_mode_ = mode; }

    int n_workers() const;

private:
    struct Region;
    struct Worker;
    void take(int n, std::vector<Worker *> & taken);
    bool create();
    void work(Worker & worker);

    mutable std::mutex    mutex_;  // guards the rest
    std::vector<Worker *> idle_;   // lowest number last
    int                   n_workers_ = 0;
    PinMode               pin_mode_  = PinMode::automatic;
};

// One step of a short wait for another thread of the team: gives the core's other half, or the core, to others.
void spin_once();

// Tells the CPU that this is a waiting loop.
inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace hybrid_moe
