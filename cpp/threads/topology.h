// What of this machine the process may use, and in which order threads should take it: cores, last-level caches, NUMA
// nodes, affinity mask (cpusets end up there) and cgroup CPU quota. Reads files; pins nothing.
#pragma once

#include <string>
#include <vector>

namespace hybrid_moe {

struct Cpu {
    int id;    // the kernel's number
    int core;  // the lowest CPU of its physical core
    int l3;    // the lowest CPU of those that share its last-level cache
    int node;  // index into Machine::nodes
};

struct Node {
    int  id;          // the kernel's number
    int  n_cores;     // physical cores with usable CPUs
    bool may_hold;    // this process may have memory there, and there is some
};

struct Machine {
    // Usable CPUs in the order in which threads should take them: one per physical core first, SMT siblings last. Each
    // run over the cores alternates between nodes, and within a node between caches: n threads get the memory channels
    // and cache links of as many of them as n allows.
    std::vector<Cpu>  cpus;
    std::vector<Node> nodes;        // those with usable CPUs, ascending; at least one
    int               n_cores = 1;  // physical cores with usable CPUs
    double            quota   = 0;  // CPUs' worth of time that the cgroup grants; 0: no limit

    // More threads than this cannot run at once.
    int n_usable() const;
    // One thread per physical core, and not more than the quota feeds: threads that wait for each other must not be
    // stopped in the middle of a layer.
    int default_threads() const;
    // Index of the node a CPU belongs to; 0 for CPUs that are not ours.
    int node_of(int cpu_id) const;
    // One JSON object.
    std::string describe() const;
};

// Reads the machine below `sys_root` and `proc_root` ("/sys", "/proc"; tests have others). `allowed` is the affinity
// mask, in ascending order. Files that are missing or make no sense leave what they would have told out: at worst n equal
// CPUs on one node. Never fails.
Machine read_machine(const std::string & sys_root, const std::string & proc_root, std::vector<int> allowed);

// The affinity mask of the calling thread.
std::vector<int> affinity_mask();

// "0-3,8" -> numbers in ascending order. False when it is no such list.
bool parse_cpu_list(const std::string & text, std::vector<int> & out);

// This process's machine, read once, at the first call (when a host loads us, from its main thread as a rule).
const Machine & machine();

// Replaces it, for tests, before anything has used it.
void pretend_machine(Machine other);

}  // namespace hybrid_moe
