// How long regions of the team take: what their start and finish cost beside other work on the same CPUs.
#pragma once

namespace hybrid_moe {

// Microseconds per region (out[rounds]) in which each thread works for work_us. Before each, the calling thread waits for
// gap_us, or the host's OpenMP team works for gap_us. Returns false when that is wanted and there is no OpenMP.
bool measure_team(int n_threads, double gap_us, bool host_works, double work_us, int rounds, double * out);

}  // namespace hybrid_moe
