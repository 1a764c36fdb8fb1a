// /sys/devices/system/{cpu,node} and the affinity mask -> Machine.
#include "threads/topology.h"

#include "threads/cgroup.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <thread>

namespace hybrid_moe {
namespace {

constexpr int max_cpus = 1 << 16;  // beyond any kernel: larger numbers are nonsense

bool read_list(const std::string & path, std::vector<int> & out) {
    std::string text;
    return read_line(path, text) && parse_cpu_list(text, out);
}

// The lowest of the CPUs in a list that must name `cpu` itself; else `cpu`, which then shares with nobody.
int lowest_sharing(const std::string & path, int cpu) {
    std::vector<int> list;
    if (!read_list(path, list) || !std::binary_search(list.begin(), list.end(), cpu)) return cpu;
    return list.front();
}

int core_of(const std::string & folder, int cpu) {
    std::string ignored;
    // thread_siblings_list is the name before Linux 5.2
    const char * name = read_line(folder + "/topology/core_cpus_list", ignored) ? "core_cpus_list" : "thread_siblings_list";
    return lowest_sharing(folder + "/topology/" + name, cpu);
}

// The cache of the highest level; -1 when no cache is described.
int last_cache_of(const std::string & folder, int cpu) {
    int best_level = 0;
    int lowest = -1;
    for (int i = 0; i < 16; i++) {
        const std::string index = folder + "/cache/index" + std::to_string(i);
        std::string level;
        if (!read_line(index + "/level", level)) break;
        if (atoi(level.c_str()) > best_level) {
            best_level = atoi(level.c_str());
            lowest = lowest_sharing(index + "/shared_cpu_list", cpu);
        }
    }
    return best_level >= 3 ? lowest : -1;
}

struct NodeFiles {
    std::map<int, int> of_cpu;  // CPU -> node id
    std::set<int>      with_memory;
};

bool has_memory(const std::string & folder) {
    FILE * f = fopen((folder + "/meminfo").c_str(), "re");
    if (!f) return false;
    char line[256];
    long long kib = 0;
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, "Node %*d MemTotal: %lld kB", &kib) == 1) break;
    }
    fclose(f);
    return kib > 0;
}

NodeFiles read_nodes(const std::string & sys_root, const std::string & proc_root) {
    NodeFiles nodes;
    const std::string root = sys_root + "/devices/system/node";
    std::vector<int> ids;
    if (!read_list(root + "/online", ids)) return nodes;
    std::vector<int> allowed;
    std::string text;
    const bool limited = read_field(proc_root + "/self/status", "Mems_allowed_list:", text) && parse_cpu_list(text, allowed);
    for (int id : ids) {
        const std::string folder = root + "/node" + std::to_string(id);
        std::vector<int> cpus;
        if (read_list(folder + "/cpulist", cpus)) {
            for (int cpu : cpus) nodes.of_cpu.emplace(cpu, id);
        }
        const bool is_allowed = !limited || std::binary_search(allowed.begin(), allowed.end(), id);
        if (is_allowed && has_memory(folder)) nodes.with_memory.insert(id);
    }
    return nodes;
}

// One of each group in turn, groups in ascending order of their key, members as they come.
template <class Key> std::vector<Cpu> take_turns(const std::vector<Cpu> & cpus, Key key) {
    std::map<int, std::vector<Cpu>> groups;
    for (const Cpu & cpu : cpus) groups[key(cpu)].push_back(cpu);
    std::vector<Cpu> out;
    for (size_t i = 0; out.size() < cpus.size(); i++) {
        for (const auto & [k, members] : groups) {
            if (i < members.size()) out.push_back(members[i]);
        }
    }
    return out;
}

std::vector<Cpu> in_order(const std::vector<Cpu> & cpus) {
    std::map<int, int> seen_of_core;
    std::map<int, std::vector<Cpu>> by_rank;  // rank: how many CPUs of the same core come before
    for (const Cpu & cpu : cpus) by_rank[seen_of_core[cpu.core]++].push_back(cpu);
    std::vector<Cpu> out;
    for (const auto & [rank, equals] : by_rank) {
        // Caches first: the turns between nodes keep each node's own order.
        std::vector<Cpu> spread;
        for (const Cpu & cpu : take_turns(equals, [](const Cpu & c) { return c.l3; })) spread.push_back(cpu);
        spread = take_turns(spread, [](const Cpu & c) { return c.node; });
        out.insert(out.end(), spread.begin(), spread.end());
    }
    return out;
}

Machine & process_machine() {
    static Machine * m = new Machine(read_machine("/sys", "/proc", affinity_mask()));
    return *m;
}

}  // namespace

bool parse_cpu_list(const std::string & text, std::vector<int> & out) {
    std::set<int> found;
    const char * p = text.c_str();
    while (*p == ' ' || *p == '\t') p++;
    while (*p) {
        char * end;
        if (*p < '0' || *p > '9') return false;
        const long first = strtol(p, &end, 10);
        long last = first;
        if (*end == '-') {
            p = end + 1;
            if (*p < '0' || *p > '9') return false;
            last = strtol(p, &end, 10);
        }
        if (last < first || last >= max_cpus) return false;
        for (long i = first; i <= last; i++) found.insert(int(i));
        p = end;
        if (*p == ',') {
            p++;
            if (!*p) return false;
        } else if (*p) {
            return false;
        }
    }
    out.assign(found.begin(), found.end());
    return !out.empty();
}

std::vector<int> affinity_mask() {
    std::vector<int> cpus;
    for (int n = 1024; n <= max_cpus; n *= 4) {  // the kernel refuses a mask shorter than its own
        cpu_set_t * set = CPU_ALLOC(size_t(n));
        const size_t size = CPU_ALLOC_SIZE(size_t(n));
        const bool fits = set && sched_getaffinity(0, size, set) == 0;
        for (int i = 0; fits && i < n; i++) {
            if (CPU_ISSET_S(size_t(i), size, set)) cpus.push_back(i);
        }
        CPU_FREE(set);
        if (fits) return cpus;
    }
    const unsigned n = std::thread::hardware_concurrency();
    for (unsigned i = 0; i < (n ? n : 1); i++) cpus.push_back(int(i));
    return cpus;
}

Machine read_machine(const std::string & sys_root, const std::string & proc_root, std::vector<int> allowed) {
    if (allowed.empty()) allowed.push_back(0);
    std::sort(allowed.begin(), allowed.end());
    const std::string cpu_root = sys_root + "/devices/system/cpu";
    std::vector<int> online;
    if (read_list(cpu_root + "/online", online)) {
        std::vector<int> both;
        std::set_intersection(allowed.begin(), allowed.end(), online.begin(), online.end(), std::back_inserter(both));
        if (!both.empty()) allowed = both;  // else the file is about another machine than the mask
    }
    const NodeFiles files = read_nodes(sys_root, proc_root);
    Machine m;
    std::map<int, int> index_of_node;
    std::vector<Cpu> cpus;
    for (int id : allowed) {
        const std::string folder = cpu_root + "/cpu" + std::to_string(id);
        const auto known = files.of_cpu.find(id);
        const int node = known == files.of_cpu.end() ? 0 : known->second;
        index_of_node.emplace(node, 0);
        cpus.push_back({id, core_of(folder, id), last_cache_of(folder, id), node});
    }
    for (auto & [id, index] : index_of_node) {
        index = int(m.nodes.size());
        m.nodes.push_back({id, 0, files.with_memory.count(id) != 0});
    }
    std::set<int> cores;
    for (Cpu & cpu : cpus) {
        cpu.node = index_of_node[cpu.node];
        if (cores.insert(cpu.core).second) m.nodes[size_t(cpu.node)].n_cores++;
    }
    m.n_cores = int(cores.size());
    m.cpus    = in_order(cpus);
    m.quota   = cpu_quota(sys_root, proc_root);
    return m;
}

int Machine::n_usable() const {
    const int n = int(cpus.size());
    return quota > 0 && std::ceil(quota) < n ? int(std::ceil(quota)) : n;
}

int Machine::default_threads() const {
    const int fed = quota > 0 ? std::max(1, int(std::floor(quota + 1e-9))) : n_cores;
    return std::min(n_cores, fed);
}

int Machine::node_of(int cpu_id) const {
    for (const Cpu & cpu : cpus) {
        if (cpu.id == cpu_id) return cpu.node;
    }
    return 0;
}

std::string Machine::describe() const {
    std::string order, node_list;
    for (const Cpu & cpu : cpus) order += (order.empty() ? "" : ", ") + std::to_string(cpu.id);
    std::set<int> caches;
    for (const Cpu & cpu : cpus) caches.insert(cpu.l3);
    for (const Node & node : nodes) {
        node_list += std::string(node_list.empty() ? "" : ", ") + "{\"id\": " + std::to_string(node.id) + ", \"cores\": " +
                     std::to_string(node.n_cores) + ", \"memory\": " + (node.may_hold ? "true" : "false") + "}";
    }
    char quota_text[32];
    snprintf(quota_text, sizeof quota_text, "%.6g", quota);
    return "{\"cpus\": [" + order + "], \"cores\": " + std::to_string(n_cores) + ", \"caches\": " +
           std::to_string(caches.size()) + ", \"nodes\": [" + node_list + "], \"quota\": " + quota_text +
           ", \"usable\": " + std::to_string(n_usable()) + ", \"default_threads\": " + std::to_string(default_threads()) + "}";
}

const Machine & machine() { return process_machine(); }

void pretend_machine(Machine other) { process_machine() = std::move(other); }

}  // namespace hybrid_moe
