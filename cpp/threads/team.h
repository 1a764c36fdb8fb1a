// Runs one function on n threads at once and waits for all of them. Knows nothing of MoE or ggml.
//
// Two providers. In hosts whose CPU back end uses OpenMP, the host's own team (libgomp's, found at run time) does the
// work: its threads spin for a while after each region, so a second pool would compete with them for the same cores.
// Everywhere else our own pool, process-wide: threads spin briefly, then park.
#pragma once

namespace hybrid_moe {

using TeamFunction = void (*)(void * context, int i_thread, int n_threads);

// Calls f(context, i, n) for i in [0, n) with n <= n_threads, one call on this thread, and returns when all have
// returned. Several threads may call it at once; the pool then serves them in turn. Creating threads may fail: the
// call then runs on fewer.
void run_team(int n_threads, TeamFunction f, void * context);

// One step of a short wait for another thread of the team: gives the core's other half, or the core, to others.
void spin_once();

// "openmp" or "pool": what run_team uses in this process.
const char * team_provider();

// Forces a provider: "openmp", "pool" or null (choose). Returns false when it is unknown or not available here.
bool choose_team_provider(const char * name);

}  // namespace hybrid_moe
