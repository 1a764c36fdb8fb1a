// The two providers of run_team. Which CPUs the threads sit on is the operating system's choice for now.
#include "team.h"

#include <dlfcn.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>

namespace hybrid_moe {
namespace {

// libgomp's entry points, whose C interface has been stable since GCC 4.
using GompParallel   = void (*)(void (*)(void *), void *, unsigned n_threads, unsigned flags);
using OmpThreadCount = int (*)();

struct OpenMp {
    GompParallel   parallel   = nullptr;
    OmpThreadCount thread_num = nullptr;
    OmpThreadCount n_threads  = nullptr;
};

// Only a libgomp that is already there is used: it must be the host's.
OpenMp find_openmp() {
    OpenMp omp;
    void * lib = dlopen("libgomp.so.1", RTLD_NOLOAD | RTLD_LAZY);
    if (!lib) return omp;
    omp.parallel   = reinterpret_cast<GompParallel>(dlsym(lib, "GOMP_parallel"));
    omp.thread_num = reinterpret_cast<OmpThreadCount>(dlsym(lib, "omp_get_thread_num"));
    omp.n_threads  = reinterpret_cast<OmpThreadCount>(dlsym(lib, "omp_get_num_threads"));
    if (!omp.parallel || !omp.thread_num || !omp.n_threads) omp = OpenMp{};
    return omp;  // the handle stays open: threads may still be inside
}

const OpenMp & openmp() {
    static const OpenMp found = find_openmp();
    return found;
}

struct Region {
    TeamFunction f;
    void *       context;
};

void openmp_region(void * data) {
    const Region & region = *static_cast<const Region *>(data);
    region.f(region.context, openmp().thread_num(), openmp().n_threads());
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spinning covers the gap between two expert matrices of a layer (tens of microseconds); longer gaps (attention on
// a GPU, an idle host) must not burn a core.
constexpr int spin_rounds = 20000;

class Pool {
public:
    void run(int n_threads, TeamFunction f, void * context) {
        std::lock_guard<std::mutex> one_at_a_time(caller_);
        grow(n_threads - 1);
        const int n_workers = n_threads - 1 < n_workers_ ? n_threads - 1 : n_workers_;
        f_       = f;
        context_ = context;
        running_.store(n_workers, std::memory_order_relaxed);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            const uint64_t epoch = (state_.load(std::memory_order_relaxed) >> 16) + 1;
            state_.store(epoch << 16 | uint64_t(n_workers), std::memory_order_release);
        }
        wake_.notify_all();
        f(context, 0, n_workers + 1);
        for (int spins = 0; running_.load(std::memory_order_acquire) != 0; spins++) {
            if (spins < spin_rounds) relax();
            else std::this_thread::yield();
        }
    }

private:
    void grow(int n_workers) {
        while (n_workers_ < n_workers) {
            const int i = n_workers_ + 1;
            const uint64_t seen = state_.load(std::memory_order_relaxed);
            try {
                std::thread([this, i, seen] { work(i, seen); }).detach();  // the process may exit while it parks
            } catch (const std::system_error &) {
                return;  // no more threads to be had: run on those there are
            }
            n_workers_++;
        }
    }

    // Only a worker that the state it saw counts in may touch the region: the caller waits for those and no others.
    void work(int i_thread, uint64_t seen) {
        for (;;) {
            uint64_t state = state_.load(std::memory_order_acquire);
            for (int spins = 0; state == seen && spins < spin_rounds; spins++) {
                relax();
                state = state_.load(std::memory_order_acquire);
            }
            if (state == seen) {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return state_.load(std::memory_order_acquire) != seen; });
                continue;
            }
            seen = state;
            const int n_workers = int(state & 0xFFFF);
            if (i_thread <= n_workers) {
                f_(context_, i_thread, n_workers + 1);
                running_.fetch_sub(1, std::memory_order_release);
            }
        }
    }

    std::mutex              caller_;         // guards n_workers_, f_, context_
    std::mutex              mutex_;          // guards parking
    std::condition_variable wake_;
    int                     n_workers_ = 0;
    std::atomic<uint64_t>   state_{0};       // region number << 16 | workers that take part
    std::atomic<int>        running_{0};
    TeamFunction            f_       = nullptr;
    void *                  context_ = nullptr;
};

Pool & pool() {
    static Pool * p = new Pool;  // never destroyed: its threads outlive static destructors
    return *p;
}

enum class Provider { undecided, openmp, pool };
std::atomic<Provider> provider{Provider::undecided};

Provider current() {
    Provider p = provider.load(std::memory_order_relaxed);
    if (p == Provider::undecided) {
        p = openmp().parallel ? Provider::openmp : Provider::pool;
        provider.store(p, std::memory_order_relaxed);
    }
    return p;
}

}  // namespace

void run_team(int n_threads, TeamFunction f, void * context) {
    if (n_threads <= 1) {
        f(context, 0, 1);
    } else if (current() == Provider::openmp) {
        Region region{f, context};
        openmp().parallel(openmp_region, &region, unsigned(n_threads), 0);
    } else {
        pool().run(n_threads, f, context);
    }
}

void spin_once() {
    // A thread that is waited for may have lost its core to somebody: yield now and then.
    thread_local unsigned steps = 0;
    if (++steps % 1024) relax();
    else std::this_thread::yield();
}

const char * team_provider() { return current() == Provider::openmp ? "openmp" : "pool"; }

bool choose_team_provider(const char * name) {
    if (!name || !*name) {
        provider.store(Provider::undecided, std::memory_order_relaxed);
    } else if (!strcmp(name, "pool")) {
        provider.store(Provider::pool, std::memory_order_relaxed);
    } else if (!strcmp(name, "openmp") && openmp().parallel) {
        provider.store(Provider::openmp, std::memory_order_relaxed);
    } else {
        return false;
    }
    return true;
}

}  // namespace hybrid_moe
