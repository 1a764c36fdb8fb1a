// Arena by mmap, madvise and mbind.
#include "threads/placement.h"

#include "threads/cgroup.h"
#include "threads/topology.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <stdexcept>

namespace hybrid_moe {
namespace {

constexpr size_t huge_page = size_t(2) << 20;
constexpr size_t max_nodes = 1024;  // bits of a node mask, the kernel's own limit

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

struct Troubles {
    std::mutex               mutex;
    std::vector<std::string> kinds;
    std::vector<std::string> sentences;
    void (*listener)(const char *) = nullptr;
};

Troubles & troubles() {
    static Troubles * t = new Troubles;
    return *t;
}

// Returns 0 or an error number.
int set_policy(void * data, size_t n_bytes, int policy, const std::vector<int> & node_ids) {
    unsigned long mask[max_nodes / (8 * sizeof(unsigned long))] = {};
    constexpr size_t bits = 8 * sizeof(unsigned long);
    for (int id : node_ids) {
        if (id < 0 || size_t(id) >= max_nodes) return EINVAL;
        mask[size_t(id) / bits] |= 1ul << (size_t(id) % bits);
    }
    return syscall(SYS_mbind, data, n_bytes, policy, mask, max_nodes, 0) == 0 ? 0 : errno;
}

std::string reason(int error) {
    if (error == EPERM) return "not permitted (a container needs the capability SYS_NICE for it)";
    if (error == ENOSYS) return "this kernel has no NUMA support";
    return strerror(error);
}

// A pool of huge pages is shared by the whole machine, and a page of it that a cpuset forbids is a SIGBUS at first
// touch: only where all memory nodes are ours.
bool may_use_reserved_huge_pages() {
    std::string allowed, with_memory;
    std::vector<int> a, b;
    return read_field("/proc/self/status", "Mems_allowed_list:", allowed) && parse_cpu_list(allowed, a) &&
           read_line("/sys/devices/system/node/has_memory", with_memory) && parse_cpu_list(with_memory, b) &&
           std::includes(a.begin(), a.end(), b.begin(), b.end());
}

}  // namespace

Arena::Arena(size_t n_bytes, int node) : node_(node) {
    const size_t page = n_bytes >= huge_page ? huge_page : size_t(sysconf(_SC_PAGESIZE));
    size_          = round_up(n_bytes ? n_bytes : 1, page);
    reserved_size_ = size_ + 2 * huge_page;
    void * p = mmap(nullptr, reserved_size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::runtime_error(std::to_string(size_ >> 20) + " MiB of address space cannot be had");
    reserved_ = static_cast<uint8_t *>(p);
    // At least one page of guard before it, and room for one behind it.
    data_ = reinterpret_cast<uint8_t *>(round_up(reinterpret_cast<uintptr_t>(reserved_) + 1, huge_page));
    try {
        map_pages(page);
    } catch (...) {
        munmap(reserved_, reserved_size_);
        throw;
    }
    if (node < 0 || machine().nodes.size() < 2) return;
    const int id = machine().nodes[size_t(node)].id;
    if (const int error = set_policy(data_, size_, MPOL_PREFERRED, {id})) {
        note_trouble("node " + std::to_string(id), "memory cannot be placed on NUMA node " + std::to_string(id) + ": " + reason(error) +
                     "; it lies where the thread runs that first writes it");
    }
}

void Arena::map_pages(size_t page) {
    static const bool try_reserved = may_use_reserved_huge_pages();
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    // No MAP_NORESERVE here: the pool must promise the pages now, or refuse now.
    if (try_reserved && page == huge_page &&
        mmap(data_, size_, PROT_READ | PROT_WRITE, flags | MAP_HUGETLB | (21 << MAP_HUGE_SHIFT), -1, 0) != MAP_FAILED) {
        return;
    }
    if (mmap(data_, size_, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, -1, 0) == MAP_FAILED) {
        throw std::runtime_error(std::to_string(size_ >> 20) + " MiB of memory cannot be mapped");
    }
    if (page == huge_page && madvise(data_, size_, MADV_HUGEPAGE) != 0) {
        note_trouble("huge pages", "no huge pages for experts: " + std::string(strerror(errno)));
    }
}

Arena::Arena(uint8_t * data, size_t n_bytes, int node, std::shared_ptr<void> owner)
    : data_(data), size_(n_bytes), node_(node), owner_(std::move(owner)) {}

Arena::~Arena() {
    if (reserved_) munmap(reserved_, reserved_size_);
}

void spread_pages(void * data, size_t n_bytes) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    uint8_t * begin = reinterpret_cast<uint8_t *>(round_up(reinterpret_cast<uintptr_t>(data), page));
    uint8_t * end = reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(data) + n_bytes) / page * page);
    if (begin >= end) return;
    madvise(begin, size_t(end - begin), MADV_HUGEPAGE);  // advice: may fail
    std::vector<int> ids;
    for (const Node & node : machine().nodes) {
        if (node.may_hold) ids.push_back(node.id);
    }
    if (ids.size() < 2) return;
    if (const int error = set_policy(begin, size_t(end - begin), MPOL_INTERLEAVE, ids)) {
        note_trouble("spread", "memory cannot be spread over NUMA nodes: " + reason(error));
    }
}

void note_trouble(const std::string & kind, const std::string & sentence) {
    Troubles & t = troubles();
    void (*listener)(const char *) = nullptr;
    {
        const std::lock_guard<std::mutex> lock(t.mutex);
        if (std::find(t.kinds.begin(), t.kinds.end(), kind) != t.kinds.end()) return;
        t.kinds.push_back(kind);
        t.sentences.push_back(sentence);
        listener = t.listener;
    }
    if (listener) listener(sentence.c_str());
}

std::vector<std::string> memory_troubles() {
    const std::lock_guard<std::mutex> lock(troubles().mutex);
    return troubles().sentences;
}

void set_trouble_listener(void (*listener)(const char *)) {
    const std::lock_guard<std::mutex> lock(troubles().mutex);
    troubles().listener = listener;
}

}  // namespace hybrid_moe
