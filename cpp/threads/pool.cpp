// Pool: a mailbox per worker, so that a region wakes those it needs and no others.
#include "threads/pool.h"

#include "threads/topology.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <system_error>
#include <thread>

namespace hybrid_moe {
namespace {

// Covers the gap between two layers whose attention runs on a GPU (tens to a few hundred microseconds); longer gaps
// must not burn a core that the host's own threads may want. How it was chosen: docs/threads.md.
constexpr std::chrono::microseconds spin_time{200};

enum State : uint32_t { spinning, parked, working };

void futex_wait(std::atomic<uint32_t> & word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t> & word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0); }

// Restricts the calling thread; the kernel may refuse, and then it runs where it ran before.
void run_on(const std::vector<int> & cpus) {
    const int n = *std::max_element(cpus.begin(), cpus.end()) + 1;
    cpu_set_t * set = CPU_ALLOC(size_t(n));
    if (!set) return;
    const size_t size = CPU_ALLOC_SIZE(size_t(n));
    CPU_ZERO_S(size, set);
    for (int cpu : cpus) CPU_SET_S(size_t(cpu), size, set);
    sched_setaffinity(0, size, set);
    CPU_FREE(set);
}

// Worker i belongs to CPU i of the order; CPU 0 is left to the caller. Not pinned still means: wherever this process
// may, because a thread is born with its creator's mask, and hosts pin theirs.
std::vector<int> cpus_of_worker(int i_worker, PinMode mode) {
    const Machine & m = machine();
    std::vector<int> all, node;
    const bool has_own = i_worker < int(m.cpus.size());
    for (const Cpu & cpu : m.cpus) {
        all.push_back(cpu.id);
        if (has_own && cpu.node == m.cpus[size_t(i_worker)].node) node.push_back(cpu.id);
    }
    if (mode == PinMode::on && has_own) return {m.cpus[size_t(i_worker)].id};
    if (mode == PinMode::automatic && m.nodes.size() > 1 && m.quota == 0 && has_own) return node;
    return all;
}

}  // namespace

struct Pool::Region {
    TeamFunction     f;
    void *           context;
    int              n_threads;
    std::atomic<int> n_running;
};

struct Pool::Worker {
    alignas(64) std::atomic<uint32_t> state{spinning};
    Region * region   = nullptr;  // written by the caller before it sets `working`
    int      i_thread = 0;
    int      number   = 0;        // 1, 2, ...
    PinMode  pin_mode = PinMode::off;
};

int Pool::n_workers() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return n_workers_;
}

bool Pool::create() {
    Worker * worker = new Worker;
    worker->number   = n_workers_ + 1;
    worker->pin_mode = pin_mode_;
    try {
        std::thread([this, worker] { work(*worker); }).detach();  // the process may exit while it parks
    } catch (const std::system_error &) {
        delete worker;
        return false;
    }
    n_workers_++;
    idle_.push_back(worker);
    return true;
}

// The idle workers with the lowest numbers: they alternate between nodes as the order of CPUs does.
void Pool::take(int n, std::vector<Worker *> & taken) {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (int(idle_.size()) < n && create()) {}
    std::sort(idle_.begin(), idle_.end(), [](const Worker * a, const Worker * b) { return a->number > b->number; });
    const size_t n_taken = std::min(idle_.size(), size_t(n));
    taken.assign(idle_.rbegin(), idle_.rbegin() + long(n_taken));
    idle_.resize(idle_.size() - n_taken);
}

void Pool::run(int n_threads, TeamFunction f, void * context) {
    thread_local std::vector<Worker *> team;  // kept: a region allocates nothing
    take(n_threads - 1, team);
    Region region{f, context, int(team.size()) + 1, {int(team.size())}};
    int i_thread = 1;
    for (Worker * worker : team) {
        worker->region   = &region;
        worker->i_thread = i_thread++;
        if (worker->state.exchange(working, std::memory_order_acq_rel) == parked) futex_wake(worker->state);
    }
    f(context, 0, region.n_threads);
    while (region.n_running.load(std::memory_order_acquire) != 0) spin_once();
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.insert(idle_.end(), team.begin(), team.end());
}

void Pool::work(Worker & worker) {
    run_on(cpus_of_worker(worker.number, worker.pin_mode));
    for (;;) {
        const auto until = std::chrono::steady_clock::now() + spin_time;
        for (int i = 0; worker.state.load(std::memory_order_acquire) != working; i++) {
            relax();
            if (i % 64 == 63 && std::chrono::steady_clock::now() > until) {
                uint32_t expected = spinning;
                worker.state.compare_exchange_strong(expected, parked, std::memory_order_acq_rel);
                while (worker.state.load(std::memory_order_acquire) == parked) futex_wait(worker.state, parked);
            }
        }
        Region * region = worker.region;
        region->f(region->context, worker.i_thread, region->n_threads);
        worker.state.store(spinning, std::memory_order_relaxed);  // before the caller may give it new work
        region->n_running.fetch_sub(1, std::memory_order_release);
    }
}

void spin_once() {
    // A thread that is waited for may have lost its core to somebody: yield now and then.
    thread_local unsigned steps = 0;
    if (++steps % 1024) relax();
    else std::this_thread::yield();
}

}  // namespace hybrid_moe
