// run_team under ThreadSanitizer: every index exactly once, regions in order, several callers, changing thread counts.
#include "threads/team.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

using namespace hybrid_moe;

namespace {

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
        for (int t = 0; t < region.expected; t++) {
            if (region.plain[t] != 1) {
                printf("thread %d of %d ran %ld times\n", t, region.expected, region.plain[t]);
                exit(1);
            }
        }
        if (region.calls.load() != region.expected) exit(2);
        if (i % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));  // long enough to park
    }
}

}  // namespace

int main() {
    if (!choose_team_provider("pool") || choose_team_provider("nonsense")) return 3;
    std::vector<std::thread> callers;
    for (unsigned seed = 1; seed <= 3; seed++) callers.emplace_back(regions, 300, seed);
    for (std::thread & t : callers) t.join();
    puts("ok");
    return 0;
}
