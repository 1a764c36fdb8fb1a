// The two providers of run_team, and the queue before them.
#include "threads/team.h"

#include "threads/topology.h"
#include "threads/turns.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstring>

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

// A region keeps its place this long at least: every change costs a wake-up and warm caches.
constexpr std::chrono::milliseconds shortest_turn{2};

struct Team {
    Turns turns{machine().n_usable(), machine().n_cores};
    Pool  pool;
};

std::atomic<Team *>  the_team{nullptr};
std::atomic<PinMode> pin_mode{PinMode::automatic};

Team * new_team() {
    Team * t = new Team;
    t->pool.set_pin_mode(pin_mode.load());
    return t;
}

// A forked child has none of the threads, and perhaps a lock that nobody will open: it begins anew.
void begin_anew() {
    if (the_team.load()) the_team.store(new_team());
}

Team & team() {
    Team * t = the_team.load(std::memory_order_acquire);
    if (t) return *t;
    Team * mine = new_team();  // never destroyed: its threads outlive static destructors
    if (!the_team.compare_exchange_strong(t, mine)) {
        delete mine;  // no thread of it runs yet
        return *t;
    }
    pthread_atfork(nullptr, nullptr, begin_anew);
    return *mine;
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

bool run_on_host_team(int n_threads, TeamFunction f, void * context) {
    if (!openmp().parallel) return false;
    Region region{f, context};
    openmp().parallel(openmp_region, &region, unsigned(n_threads), 0);
    return true;
}

void run_team(int n_threads, TeamFunction f, void * context) {
    const bool is_pool = current() == Provider::pool;
    if (is_pool && n_threads > team_capacity()) n_threads = team_capacity();
    if (n_threads <= 1) {
        f(context, 0, 1);
        return;
    }
    const Visit visit(team().turns, n_threads);
    if (is_pool) {
        team().pool.run(n_threads, f, context);
    } else {
        run_on_host_team(n_threads, f, context);
    }
}

int team_capacity() { return team().turns.capacity(); }
void set_team_capacity(int n_threads) { team().turns.set_capacity(n_threads < 1 ? 1 : n_threads); }

bool Turn::is_over() const {
    return gives_way_ && team().turns.somebody_waits() && std::chrono::steady_clock::now() - began_ >= shortest_turn;
}

const char * team_provider() { return current() == Provider::openmp ? "openmp" : "pool"; }

bool choose_team_provider(const char * name) {
    if (!name) {
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

const char * team_pin_mode() {
    switch (pin_mode.load()) {
        case PinMode::on:  return "on";
        case PinMode::off: return "off";
        default:           return "auto";
    }
}

bool choose_pin_mode(const char * name) {
    if (!name) {
        pin_mode.store(PinMode::automatic);
    } else if (!strcmp(name, "on")) {
        pin_mode.store(PinMode::on);
    } else if (!strcmp(name, "off")) {
        pin_mode.store(PinMode::off);
    } else {
        return false;
    }
    team().pool.set_pin_mode(pin_mode.load());
    return true;
}

}  // namespace hybrid_moe
