// Memory for weights on chosen NUMA nodes, in huge pages where the system has them, and an honest count of where its
// pages are. Raw system calls, no libnuma. What cannot be had degrades; only address space is indispensable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace hybrid_moe {

// Anonymous memory, zero until written. Pages appear when they are first written, on the wanted node as long as it has
// room: the policy is a preference and never a binding, because a process that exceeds a node it is bound to is killed.
class Arena {
public:
    // `node`: index into machine().nodes, or -1 for any. Throws std::runtime_error when there is no address space.
    Arena(size_t n_bytes, int node);
    // Memory of somebody else, for as long as `owner` lives.
    Arena(uint8_t * data, size_t n_bytes, int node, std::shared_ptr<void> owner);
    ~Arena();
    Arena(const Arena &) = delete;
    Arena & operator=(const Arena &) = delete;

    uint8_t * data() const { return data_; }
    size_t size() const { return size_; }
    int node() const { return node_; }

private:
    void map_pages(size_t n_bytes);

    uint8_t * reserved_      = nullptr;  // with a guard on both sides, so that no neighbour is counted with us
    size_t    reserved_size_ = 0;
    uint8_t * data_          = nullptr;
    size_t    size_          = 0;
    int       node_          = -1;
    std::shared_ptr<void> owner_;
};

// Where the pages of arenas are now.
struct PageCount {
    std::vector<uint64_t> on_node;         // bytes, by index into machine().nodes
    uint64_t              elsewhere  = 0;  // bytes on nodes that are not ours
    uint64_t              huge       = 0;  // bytes in huge pages
    bool                  is_known   = false;  // false: the kernel does not tell (no NUMA support, /proc not there)
};
PageCount count_pages(const std::vector<const Arena *> & arenas);

// Advises huge pages for memory of somebody else, and spreads its pages evenly over the nodes. For memory that nothing
// has been written to.
void spread_pages(void * data, size_t n_bytes);

// Bytes that can be written before the machine or the cgroup's memory limit is full; page cache counts as free.
uint64_t memory_left();

// Something about memory turned out worse than wanted. Of each kind the first sentence is kept, in the order of time.
void note_trouble(const std::string & kind, const std::string & sentence);
std::vector<std::string> memory_troubles();
// Called with each new sentence; null: nobody listens.
void set_trouble_listener(void (*listener)(const char * sentence));

}  // namespace hybrid_moe
