// Where pages are, from /proc/self/numa_maps and smaps; how many more there can be, from /proc/meminfo and the cgroup.
#include "threads/cgroup.h"
#include "threads/placement.h"
#include "threads/topology.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace hybrid_moe {
namespace {

// Arenas by address. A mapping of the kernel's lists begins inside an arena or has nothing to do with it: guards on both
// sides keep mappings from growing together.
class Ranges {
public:
    explicit Ranges(const std::vector<const Arena *> & arenas) {
        for (const Arena * a : arenas) all_.emplace_back(reinterpret_cast<uintptr_t>(a->data()), a->size());
        std::sort(all_.begin(), all_.end());
    }
    bool contain(uint64_t address) const {
        auto after = std::upper_bound(all_.begin(), all_.end(), std::make_pair(address, UINT64_MAX));
        return after != all_.begin() && address - std::prev(after)->first < std::prev(after)->second;
    }

private:
    std::vector<std::pair<uint64_t, uint64_t>> all_;
};

int index_of_node(int id) {
    const std::vector<Node> & nodes = machine().nodes;
    for (size_t i = 0; i < nodes.size(); i++) {
        if (nodes[i].id == id) return int(i);
    }
    return -1;
}

// "7f0000000000 prefer:1 anon=512 dirty=512 N0=12 N1=500 kernelpagesize_kB=4"
void add_numa_line(const std::string & line, PageCount & count) {
    std::istringstream words(line);
    std::vector<std::pair<int, uint64_t>> pages;
    uint64_t page_bytes = 4096;
    for (std::string word; words >> word;) {
        int id;
        uint64_t n;
        if (sscanf(word.c_str(), "N%d=%" SCNu64, &id, &n) == 2) pages.emplace_back(id, n);
        else if (sscanf(word.c_str(), "kernelpagesize_kB=%" SCNu64, &n) == 1) page_bytes = n << 10;
    }
    for (const auto & [id, n] : pages) {
        const int i = index_of_node(id);
        (i < 0 ? count.elsewhere : count.on_node[size_t(i)]) += n * page_bytes;
    }
}

uint64_t kib(const std::string & line) { return strtoull(line.c_str() + line.find(':') + 1, nullptr, 10); }

uint64_t huge_bytes(const Ranges & ranges) {
    std::ifstream smaps("/proc/self/smaps");
    uint64_t bytes = 0;
    bool is_ours = false;
    for (std::string line; std::getline(smaps, line);) {
        uint64_t begin, end;
        if (sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " ", &begin, &end) == 2) is_ours = ranges.contain(begin);
        else if (is_ours && (line.rfind("AnonHugePages:", 0) == 0 || line.rfind("Private_Hugetlb:", 0) == 0)) bytes += kib(line) << 10;
    }
    return bytes;
}

uint64_t available_bytes() {
    std::string text;
    return read_field("/proc/meminfo", "MemAvailable:", text) ? strtoull(text.c_str(), nullptr, 10) << 10 : UINT64_MAX;
}

}  // namespace

PageCount count_pages(const std::vector<const Arena *> & arenas) {
    PageCount count;
    count.on_node.resize(machine().nodes.size());
    const Ranges ranges(arenas);
    std::ifstream numa("/proc/self/numa_maps");
    for (std::string line; std::getline(numa, line);) {
        count.is_known = true;
        if (ranges.contain(strtoull(line.c_str(), nullptr, 16))) add_numa_line(line, count);
    }
    count.huge = huge_bytes(ranges);
    return count;
}

uint64_t memory_left() {
    const uint64_t limit = cgroup_memory_left("/sys", "/proc");
    const uint64_t available = available_bytes();
    return available < limit ? available : limit;
}

}  // namespace hybrid_moe
