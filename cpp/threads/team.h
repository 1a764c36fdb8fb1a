// Runs one function on n threads at once and waits for all of them. Knows nothing of MoE or ggml.
//
// Two providers. In hosts whose CPU back end uses OpenMP, the host's own team (libgomp's, found at run time) does the
// work: its threads spin for a while after each region, so a second pool would compete with them for the same cores
// (measured: docs/threads.md). Everywhere else our own pool (pool.h). With both, several contexts take turns (turns.h).
#pragma once

#include "threads/pool.h"

#include <chrono>

namespace hybrid_moe {

// Calls f(context, i, n) for i in [0, n) with n <= n_threads, one call on this thread, and returns when all have
// returned. Several threads may call it at once: their regions run beside each other as far as there are CPUs, else one
// after the other. The pool never runs more threads than team_capacity; a host's OpenMP team is as large as the host
// asked for, because those threads exist anyway. f must not call run_team.
void run_team(int n_threads, TeamFunction f, void * context);

// CPUs that this process can keep busy (affinity mask, cgroup quota), unless set otherwise.
int team_capacity();
void set_team_capacity(int n_threads);

// A region that may last long asks, between pieces of its work, whether its turn is over: others wait, and it has run for
// a while. It then returns from run_team with the rest of its work undone, and calls it again: behind the others.
// One that does not give way is never over: two batches of tokens that interrupt each other would both end late.
class Turn {
public:
    explicit Turn(bool gives_way = true) : gives_way_(gives_way) {}
    bool is_over() const;

private:
    bool gives_way_;
    std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

// "openmp" or "pool": what run_team uses in this process.
const char * team_provider();

// Forces a provider: "openmp", "pool" or null (choose). Returns false when it is unknown or not available here.
bool choose_team_provider(const char * name);

// The same on the host's OpenMP team, whatever the provider is and without waiting for a turn: what a host does between our
// regions, for measurements. Returns false when there is no OpenMP in this process.
bool run_on_host_team(int n_threads, TeamFunction f, void * context);

// "auto", "on" or "off".
const char * team_pin_mode();

// "on", "off" or null (choose). Returns false when it is none of them.
bool choose_pin_mode(const char * name);

}  // namespace hybrid_moe
