// Copies of experts in memory, once per process: by rows on NUMA nodes, in huge pages where possible, shared by all models
// that are of the same bytes of the same files. Knows no formats.
#pragma once

#include "moe/row_parts.h"
#include "threads/placement.h"

#include <atomic>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace hybrid_moe {

// Bytes of a file, as it is now: a file that was written to since is another one.
struct FilePiece {
    uint64_t device, inode, changed;  // changed: when, in nanoseconds
    uint64_t offset, n_bytes;
    auto operator<=>(const FilePiece &) const = default;
};

// The experts of one tensor: [n_expert][n_rows][row_bytes], each node's rows together in an arena of that node. An expert
// is copied when it is first asked for: opening a model reads none.
// Where the memory of a copy comes from: n_bytes on that node. Empty: ordinary memory.
using ArenaSource = std::function<std::unique_ptr<Arena>(size_t n_bytes, int node)>;

class ExpertCopy {
public:
    // Throws std::runtime_error when there is no address space.
    ExpertCopy(int64_t n_expert, int64_t n_rows, size_t row_bytes, std::vector<RowPart> parts, const ArenaSource & source = {});
    ~ExpertCopy();
    ExpertCopy(const ExpertCopy &) = delete;
    ExpertCopy & operator=(const ExpertCopy &) = delete;

    // Copies the expert from `from` unless it is there. May be called by several threads; when it returns, it is there.
    void fetch(int64_t i_expert, const uint8_t * from);

    bool has(int64_t i_expert) const { return is_there_[size_t(i_expert)].load(std::memory_order_acquire); }

    const std::vector<RowPart> & parts() const { return parts_; }

    // The address that row 0 of the expert would have if all its rows lay like those of the part that holds `row`; the
    // part ends before row_end.
    const uint8_t * rows_at(int64_t i_expert, int64_t row, int64_t & row_end) const;

    uint64_t n_bytes() const { return n_expert_ * expert_bytes_; }
    uint64_t n_copied() const { return n_copied_.load(std::memory_order_relaxed) * expert_bytes_; }

private:
    friend class CopyRegistry;
    uint8_t * address(int64_t i_expert, size_t i_part) const;

    const uint64_t                      n_expert_;
    const size_t                        row_bytes_;
    const uint64_t                      expert_bytes_;
    const std::vector<RowPart>          parts_;
    std::vector<std::unique_ptr<Arena>> arenas_;    // one per node that has rows
    std::vector<size_t>                 arena_of_;  // per part
    std::vector<uint64_t>               offset_;    // per part: of its first row within the node's rows of one expert
    std::vector<uint64_t>               stride_;    // per arena: bytes of one expert there
    std::unique_ptr<std::atomic<bool>[]> is_there_;
    std::mutex                          locks_[16];  // by expert: different experts are copied side by side
    std::atomic<uint64_t>               n_copied_{0};
};

// The copy for a tensor of these pieces (one per expert, or one for all), shared with whoever has it already. Null when
// memory does not suffice, which is noted (note_trouble): the bytes are then used where they are.
std::shared_ptr<ExpertCopy> shared_copy(const std::string & name, const std::vector<FilePiece> & pieces, int64_t n_expert,
                                        int64_t n_rows, size_t row_bytes, const ArenaSource & source = {});

// What is held now, as a JSON object; when nothing is held, what was held last if `or_last`. Asks the kernel where every page is.
std::string describe_copies(bool or_last);

// From now on, what is held is described just before the last copy goes (for reports at the end of the process).
void keep_last_description();

}  // namespace hybrid_moe
