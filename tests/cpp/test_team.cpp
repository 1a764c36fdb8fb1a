// run_team under ThreadSanitizer: every index exactly once, several callers at once, changing thread counts, turns, pinning,
// a forked child.
#include "threads/team.h"
#include "threads/topology.h"
#include "threads/turns.h"

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

using namespace hybrid_moe;

namespace {

void expect(bool holds, const char * what) {
    if (holds) return;
    printf("not so: %s\n", what);
    _exit(1);
}

struct Region {
    std::atomic<int> calls{0};
    int  expected = 0;
    long plain[16] = {};  // written without atomics by its own thread only: a race if an index runs twice
};

void visit(void * context, int i_thread, int n_threads) {
    Region & region = *static_cast<Region *>(context);
    if (n_threads > region.expected) abort();
    region.plain[i_thread]++;
    region.calls.fetch_add(1, std::memory_order_relaxed);
}

void regions(int n, unsigned seed) {
    for (int i = 0; i < n; i++) {
        Region region;
        seed = seed * 1664525u + 1013904223u;
        region.expected = 1 + int(seed >> 16) % 5;
        run_team(region.expected, visit, &region);
        for (int t = 0; t < region.expected; t++) expect(region.plain[t] == 1, "an index runs exactly once");
        expect(region.calls.load() == region.expected, "all indices run");
        if (i % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));  // long enough to park
    }
}

void several_callers() {
    set_team_capacity(8);  // regions of three callers fit beside each other now and then
    std::vector<std::thread> callers;
    for (unsigned seed = 1; seed <= 3; seed++) callers.emplace_back(regions, 300, seed);
    for (std::thread & t : callers) t.join();
}

// Counts the threads that compute at the same time, over all regions.
struct Crowd {
    std::atomic<int> now{0};
    std::atomic<int> most{0};
};
Crowd crowd;

void stay_a_while(void *, int, int) {
    const int n = crowd.now.fetch_add(1) + 1;
    int most = crowd.most.load();
    while (n > most && !crowd.most.compare_exchange_weak(most, n)) {}
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    crowd.now.fetch_sub(1);
}

void two_contexts_never_exceed_the_capacity(int capacity, int n_threads, int n_most) {
    set_team_capacity(capacity);
    crowd.most.store(0);
    std::vector<std::thread> contexts;
    for (int c = 0; c < 2; c++) {
        contexts.emplace_back([&] {
            for (int i = 0; i < 50; i++) run_team(n_threads, stay_a_while, nullptr);
        });
    }
    for (std::thread & t : contexts) t.join();
    expect(crowd.most.load() <= n_most, "two contexts keep to the capacity");
    if (n_most == 2 * n_threads) expect(crowd.most.load() > n_threads, "two that fit run beside each other");
}

void a_team_is_no_larger_than_the_capacity() {
    set_team_capacity(3);
    Region region;
    region.expected = 3;
    run_team(16, visit, &region);
    expect(region.calls.load() == 3, "16 threads asked for with room for 3 are 3");
}

// A region of many pieces that offers its place, and a short one that comes while it runs.
struct Long {
    std::atomic<int> pieces{0};
    Turn             turn;
};

constexpr int n_pieces = 400;

void piece_by_piece(void * context, int, int) {
    Long & work = *static_cast<Long *>(context);
    while (work.pieces.load() < n_pieces && !work.turn.is_over()) {
        work.pieces.fetch_add(1);
        std::this_thread::sleep_for(std::chrono::microseconds(500));
    }
}

void a_short_region_does_not_wait_for_a_long_one() {
    set_team_capacity(2);
    Long work;
    std::atomic<int> n_turns{0};
    std::thread prompt([&] {
        for (; work.pieces.load() < n_pieces; work.turn = Turn(), n_turns++) run_team(2, piece_by_piece, &work);
    });
    while (work.pieces.load() < 4) std::this_thread::yield();
    Region token;
    token.expected = 2;
    run_team(2, visit, &token);
    expect(work.pieces.load() < n_pieces, "the short region came between");
    prompt.join();
    expect(token.calls.load() == 2 && work.pieces.load() >= n_pieces, "both were done");
    expect(n_turns.load() >= 2, "the long one took several turns");
}

void one_that_does_not_give_way_is_done_in_one_turn() {
    set_team_capacity(2);
    Long work;
    work.turn = Turn(false);
    std::atomic<bool> came_after{false};
    std::thread other([&] {
        while (work.pieces.load() < 4) std::this_thread::yield();
        Region region;
        region.expected = 2;
        run_team(2, visit, &region);
        came_after = work.pieces.load() >= n_pieces;
    });
    run_team(2, piece_by_piece, &work);
    const int n_done = work.pieces.load();
    other.join();
    expect(n_done >= n_pieces && came_after.load(), "the region that waited came after the whole of the other one");
}

void siblings_are_no_room() {
    Turns turns(4, 2);  // two cores of two threads each
    turns.enter(2);
    std::atomic<bool> is_in{false};
    std::thread other([&] {
        turns.enter(2);
        is_in = true;
        turns.leave(2);
    });
    while (!turns.somebody_waits()) std::this_thread::yield();
    expect(!is_in.load(), "it waits, though there are CPUs");
    turns.leave(2);
    other.join();
    expect(is_in.load() && turns.capacity() == 4, "its turn comes, and regions may be as large as before");
}

void first_come_first_served() {
    Turns turns(2, 2);
    std::vector<int> order;
    std::mutex mutex;
    turns.enter(2);
    std::vector<std::thread> waiting;
    for (int i = 0; i < 4; i++) {
        waiting.emplace_back([&, i] {
            turns.enter(2);
            {
                const std::lock_guard<std::mutex> lock(mutex);
                order.push_back(i);
            }
            turns.leave(2);
        });
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    expect(turns.somebody_waits(), "they wait");
    turns.leave(2);
    for (std::thread & t : waiting) t.join();
    expect(order == std::vector<int>({0, 1, 2, 3}), "first come, first served");
    expect(!turns.somebody_waits(), "nobody waits any more");
}

struct Masks {
    std::mutex mutex;
    std::set<std::vector<int>> of_workers;
    std::vector<int>           of_caller;
};

void look_at_mask(void * context, int i_thread, int) {
    Masks & masks = *static_cast<Masks *>(context);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // until every worker has pinned itself
    const std::vector<int> mask = affinity_mask();
    const std::lock_guard<std::mutex> lock(masks.mutex);
    if (i_thread == 0) masks.of_caller = mask;
    else masks.of_workers.insert(mask);
}

Masks masks_with(PinMode mode, int n_threads) {
    Masks masks;
    Pool * leaked = new Pool;  // its threads live as long as the process
    leaked->set_pin_mode(mode);
    leaked->run(n_threads, look_at_mask, &masks);
    return Masks{{}, masks.of_workers, masks.of_caller};
}

// The last usable CPU poses as a node of its own: the only one that can be pinned to on any machine.
void workers_are_pinned_where_the_mode_says() {
    const std::vector<int> all = affinity_mask();
    if (all.size() < 2) return;
    Machine m;
    m.cpus  = {{all[0], all[0], 0, 0}, {all[1], all[1], 0, 1}};
    m.nodes = {{0, 1, true}, {1, 1, true}};
    for (size_t i = 2; i < all.size(); i++) m.cpus.push_back({all[i], all[i], 0, 0});
    m.n_cores = int(all.size());
    pretend_machine(m);
    const std::set<std::vector<int>> second = {{all[1]}}, everywhere = {all};
    expect(masks_with(PinMode::automatic, 2).of_workers == second, "automatic: on its node");
    expect(masks_with(PinMode::on, 2).of_workers == second, "on: on its CPU");
    expect(masks_with(PinMode::off, 2).of_workers == everywhere, "off: everywhere");
    expect(masks_with(PinMode::on, 2).of_caller == all, "the caller is left alone");
    m.quota = 1.5;
    pretend_machine(m);
    expect(masks_with(PinMode::automatic, 2).of_workers == everywhere, "automatic: nowhere under a quota");
    m.quota = 0;
    m.nodes.pop_back();
    for (Cpu & cpu : m.cpus) cpu.node = 0;
    pretend_machine(m);
    expect(masks_with(PinMode::automatic, 2).of_workers == everywhere, "automatic: nowhere on one node");
    // A caller that its host has pinned passes its mask on to no worker.
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(size_t(all[0]), &one);
    std::thread([&] {
        sched_setaffinity(0, sizeof one, &one);
        expect(masks_with(PinMode::off, 2).of_workers == everywhere, "workers do not inherit the caller's mask");
    }).join();
}

void a_forked_child_begins_anew() {
    set_team_capacity(2);
    const pid_t child = fork();
    if (child == 0) {
        Region region;
        region.expected = 2;
        run_team(2, visit, &region);
        _exit(region.calls.load() >= 1 ? 0 : 1);
    }
    int status = -1;
    expect(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, "a child has a team");
}

}  // namespace

int main(int n_arguments, char **) {
    expect(choose_team_provider("pool") && !choose_team_provider("nonsense"), "providers by name");
    expect(choose_pin_mode(nullptr) && !choose_pin_mode("nonsense"), "pin modes by name");
    several_callers();
    two_contexts_never_exceed_the_capacity(2, 2, 2);
    two_contexts_never_exceed_the_capacity(3, 2, 2);
    two_contexts_never_exceed_the_capacity(4, 2, 4);
    a_team_is_no_larger_than_the_capacity();
    a_short_region_does_not_wait_for_a_long_one();
    one_that_does_not_give_way_is_done_in_one_turn();
    siblings_are_no_room();
    first_come_first_served();
    workers_are_pinned_where_the_mode_says();
    // ThreadSanitizer's runtime does not survive a fork of a process with threads: that test runs without it.
    if (n_arguments > 1) a_forked_child_begins_anew();
    puts("ok");
    return 0;
}
