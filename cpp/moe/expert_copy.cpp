// ExpertCopy, and the registry that makes it one per process.
#include "moe/expert_copy.h"

#include "threads/topology.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <stdexcept>
#include <tuple>

namespace hybrid_moe {

// Every copy there is. Lock order: registry, then nothing.
class CopyRegistry {
public:
    static CopyRegistry & get() {
        static CopyRegistry * r = new CopyRegistry;
        return *r;
    }

    using Key = std::tuple<std::vector<FilePiece>, int64_t, int64_t, size_t>;

    std::mutex                            mutex;
    std::map<Key, std::weak_ptr<ExpertCopy>> by_key;
    std::set<const ExpertCopy *>          all;
    bool                                  keeps_last = false;
    std::string                           last;

    void add(const ExpertCopy * copy) {
        const std::lock_guard<std::mutex> lock(mutex);
        all.insert(copy);
    }

    void remove(const ExpertCopy * copy) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (keeps_last && is_first_of_an_end_) last = describe();
        is_first_of_an_end_ = false;
        all.erase(copy);
        for (auto i = by_key.begin(); i != by_key.end();) i = i->second.expired() ? by_key.erase(i) : std::next(i);
    }

    // With the lock held. Bytes that are promised and not written yet.
    uint64_t still_to_come() const {
        uint64_t n = 0;
        for (const ExpertCopy * c : all) n += c->n_bytes() - c->n_copied();
        return n;
    }

    void note_use() { is_first_of_an_end_ = true; }

    // With the lock held.
    std::string describe() const;

private:
    bool is_first_of_an_end_ = true;  // a model goes tensor by tensor: describe what was there before the first
};

namespace {

std::string number(uint64_t n) { return std::to_string(n); }

// Names in sentences come from files.
std::string quoted(const std::string & text) {
    std::string out = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') out += '\\';
        out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
    return out + '"';
}

// What must stay free for everything else: KV cache, activations, the system.
uint64_t reserve() { return uint64_t(1) << 30; }

uint64_t mib(uint64_t bytes) { return bytes >> 20; }

}  // namespace

std::string CopyRegistry::describe() const {
    const std::vector<Node> & nodes = machine().nodes;
    std::vector<uint64_t> wanted(nodes.size());
    std::vector<const Arena *> arenas;
    uint64_t copied = 0, anywhere = 0, planned = 0;
    for (const ExpertCopy * c : all) {
        for (const auto & a : c->arenas_) arenas.push_back(a.get());
        copied += c->n_copied();
        planned += c->n_bytes();
        for (const RowPart & part : c->parts_) {
            const uint64_t bytes = uint64_t(part.row1 - part.row0) * c->row_bytes_ * c->n_copied_.load();
            (part.node < 0 ? anywhere : wanted[size_t(part.node)]) += bytes;
        }
    }
    const PageCount pages = count_pages(arenas);
    std::string node_list;
    for (size_t i = 0; i < nodes.size(); i++) {
        node_list += std::string(i ? ", " : "") + "{\"id\": " + std::to_string(nodes[i].id) + ", \"wanted\": " + number(wanted[i]) +
                     ", \"there\": " + (pages.is_known ? number(pages.on_node[i]) : "null") + "}";
    }
    std::string troubles;
    for (const std::string & t : memory_troubles()) troubles += (troubles.empty() ? "" : ", ") + quoted(t);
    return "{\"tensors\": " + number(all.size()) + ", \"planned\": " + number(planned) + ", \"copied\": " + number(copied) +
           ", \"anywhere\": " + number(anywhere) + ", \"nodes\": [" + node_list + "], \"elsewhere\": " + number(pages.elsewhere) +
           ", \"huge_pages\": " + number(pages.huge) + ", \"troubles\": [" + troubles + "]}";
}

ExpertCopy::ExpertCopy(int64_t n_expert, int64_t n_rows, size_t row_bytes, std::vector<RowPart> parts, const ArenaSource & source)
    : n_expert_(uint64_t(n_expert)), row_bytes_(row_bytes), expert_bytes_(uint64_t(n_rows) * row_bytes),
      parts_(std::move(parts)), is_there_(new std::atomic<bool>[size_t(n_expert)]()) {
    std::vector<int> node_of_arena;
    for (const RowPart & part : parts_) {
        const auto known = std::find(node_of_arena.begin(), node_of_arena.end(), part.node);
        const size_t i = size_t(known - node_of_arena.begin());
        if (known == node_of_arena.end()) {
            node_of_arena.push_back(part.node);
            stride_.push_back(0);
        }
        arena_of_.push_back(i);
        offset_.push_back(stride_[i]);
        stride_[i] += uint64_t(part.row1 - part.row0) * row_bytes;
    }
    for (size_t i = 0; i < stride_.size(); i++) {
        const size_t n_bytes = size_t(stride_[i] * n_expert_);
        arenas_.push_back(source ? source(n_bytes, node_of_arena[i]) : std::make_unique<Arena>(n_bytes, node_of_arena[i]));
    }
    CopyRegistry::get().add(this);
}

ExpertCopy::~ExpertCopy() { CopyRegistry::get().remove(this); }

uint8_t * ExpertCopy::address(int64_t i_expert, size_t i_part) const {
    const size_t i = arena_of_[i_part];
    return arenas_[i]->data() + uint64_t(i_expert) * stride_[i] + offset_[i_part];
}

void ExpertCopy::fetch(int64_t i_expert, const uint8_t * from) {
    std::atomic<bool> & is_there = is_there_[size_t(i_expert)];
    if (is_there.load(std::memory_order_acquire)) return;
    const std::lock_guard<std::mutex> lock(locks_[size_t(i_expert) % (sizeof locks_ / sizeof locks_[0])]);
    if (is_there.load(std::memory_order_relaxed)) return;
    for (size_t i = 0; i < parts_.size(); i++) {
        const RowPart & part = parts_[i];
        memcpy(address(i_expert, i), from + uint64_t(part.row0) * row_bytes_, size_t(part.row1 - part.row0) * row_bytes_);
    }
    n_copied_.fetch_add(1, std::memory_order_relaxed);
    is_there.store(true, std::memory_order_release);
}

const uint8_t * ExpertCopy::rows_at(int64_t i_expert, int64_t row, int64_t & row_end) const {
    size_t i = 0;
    while (i + 1 < parts_.size() && parts_[i].row1 <= row) i++;
    row_end = parts_[i].row1;
    // By numbers: the row before the part's first is no address of the arena's.
    const uintptr_t row0 = reinterpret_cast<uintptr_t>(address(i_expert, i)) - uintptr_t(parts_[i].row0) * row_bytes_;
    return reinterpret_cast<const uint8_t *>(row0);
}

std::shared_ptr<ExpertCopy> shared_copy(const std::string & name, const std::vector<FilePiece> & pieces, int64_t n_expert,
                                        int64_t n_rows, size_t row_bytes, const ArenaSource & source) {
    CopyRegistry & registry = CopyRegistry::get();
    const CopyRegistry::Key key = {pieces, n_expert, n_rows, row_bytes};
    uint64_t to_come;
    {
        const std::lock_guard<std::mutex> lock(registry.mutex);
        registry.note_use();
        const auto known = registry.by_key.find(key);
        if (known != registry.by_key.end()) {
            if (auto copy = known->second.lock()) return copy;
        }
        to_come = registry.still_to_come() + reserve();
    }
    const uint64_t wanted = uint64_t(n_expert) * uint64_t(n_rows) * row_bytes;
    const uint64_t left = memory_left();
    if (to_come > left || wanted > left - to_come) {
        note_trouble("memory is full", "experts_memory=copy: memory is full before tensor '" + name + "' (" + number(mib(wanted)) + " MiB): " +
                     number(mib(left)) + " MiB are left, of which " + number(mib(to_come)) +
                     " are promised; it and others that do not fit are read from their files");
        return nullptr;
    }
    try {
        auto copy = std::make_shared<ExpertCopy>(n_expert, n_rows, row_bytes, divide_rows(n_rows), source);
        std::shared_ptr<ExpertCopy> other;  // goes after the lock, which its destructor takes
        const std::lock_guard<std::mutex> lock(registry.mutex);
        std::weak_ptr<ExpertCopy> & slot = registry.by_key[key];
        other = slot.lock();
        if (other) copy.swap(other);  // another load was quicker
        else slot = copy;
        return copy;
    } catch (const std::runtime_error & e) {
        note_trouble("address space", "experts_memory=copy: tensor '" + name + "' is read from its file: " + e.what());
        return nullptr;
    }
}

std::string describe_copies(bool or_last) {
    CopyRegistry & registry = CopyRegistry::get();
    const std::lock_guard<std::mutex> lock(registry.mutex);
    if (registry.all.empty() && or_last && !registry.last.empty()) return registry.last;
    return registry.describe();
}

void keep_last_description() {
    CopyRegistry & registry = CopyRegistry::get();
    const std::lock_guard<std::mutex> lock(registry.mutex);
    registry.keeps_last = true;
}

}  // namespace hybrid_moe
