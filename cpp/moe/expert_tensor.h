// The weights of all experts of one projection ([n_expert, n_rows, k]), wherever their bytes lie, and the check of
// their contents on first use. Does not own the bytes: `keep_alive` does.
#pragma once

#include "kernels/kernels.h"
#include "moe/expert_copy.h"

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace hybrid_moe {

// e8m0: powers of two, 2^(byte - 127), 255 is NaN (OCP Microscaling specification).
enum class ScaleType : int { f32 = 0, bf16 = 1, e8m0 = 2 };

constexpr size_t scale_bytes(ScaleType type) { return type == ScaleType::f32 ? 4 : type == ScaleType::bf16 ? 2 : 1; }

// FP8 scales as the checkpoint stores them: value = code x scale[row / block_rows][column / block_k].
struct BlockScales {
    ScaleType type       = ScaleType::f32;
    int64_t   block_rows = 0;
    int64_t   block_k    = 0;
    std::vector<const uint8_t *> of_expert;  // [n_expert] row-major grids, unaligned
};

// Scales that may belong to a tensor whose origin is not certain. `read_codes` reads the codes they belong to: n bytes
// at `offset` of the whole tensor; false when it cannot.
struct ScaleCandidate {
    BlockScales                 scales;
    std::shared_ptr<const void> keep_alive;
    std::function<bool(uint64_t offset, size_t n, void * out)> read_codes;
};

class ExpertTensor {
public:
    struct Shape {
        WeightType type;
        int64_t    n_expert;
        int64_t    n_rows;
        int64_t    k;
        size_t     row_bytes;
    };

    // `of_expert`: [n_expert] pointers to n_rows x row_bytes bytes. `scales` only for FP8.
    ExpertTensor(std::string name, const Shape & shape, std::vector<const uint8_t *> of_expert, BlockScales scales,
                 std::shared_ptr<const void> keep_alive);
    // FP8 with several possible scales: the first use compares the tensor's bytes with each candidate's.
    ExpertTensor(std::string name, const Shape & shape, std::vector<const uint8_t *> of_expert,
                 std::vector<ScaleCandidate> candidates);
    ~ExpertTensor();
    ExpertTensor(const ExpertTensor &) = delete;
    ExpertTensor & operator=(const ExpertTensor &) = delete;

    const std::string & name() const { return name_; }
    const Shape & shape() const { return shape_; }

    // Rows and columns of a block of FP8 scales; 0 without.
    void block(int64_t & rows, int64_t & k) const {
        rows = scales_.block_rows;
        k    = scales_.block_k;
    }

    // Which bytes of which files the weights are: one piece per expert, or one for all.
    void set_origin(std::vector<FilePiece> pieces) { origin_ = std::move(pieces); }
    // From now on experts are copied to memory at their first use. False when the origin is not known or memory does not
    // suffice: they are then used where they are.
    bool copy_to_memory(const ArenaSource & source = {});
    // Something that lives as long as the tensor: pins of its bytes.
    void hold(std::shared_ptr<void> thing) { held_ = std::move(thing); }
    bool is_held() const { return bool(held_); }
    bool is_copied() const { return bool(copy_); }

    // Where the bytes of one expert came from, in one piece, whether or not there is a copy.
    const uint8_t * source(int64_t i_expert) const { return codes_[size_t(i_expert)]; }

    // The rows of each NUMA node; empty without a copy.
    const std::vector<RowPart> & parts() const;

    // One expert from `row` on; only rows before row_end may be read. Only after is_ready(i_expert).
    ExpertMatrix matrix(int64_t i_expert, int64_t row, int64_t & row_end) const;

    // FP8 experts are looked at when they are first used, so that opening a checkpoint reads none of them: codes and
    // scales must be finite, and scales become float. Experts to be copied are copied then. Others are always ready.
    bool is_ready(int64_t i_expert) const {
        return !ready_ || ready_[size_t(i_expert)].load(std::memory_order_acquire);
    }
    // May be called by several threads, also for the same expert. Returns null, or a sentence that says what is wrong.
    const char * make_ready(int64_t i_expert, const Kernels & kernels);

private:
    void allocate_scales();
    void expect_first_use();
    const char * expand_scales(int64_t i_expert);
    const char * choose_scales(int64_t i_expert);
    const char * reject(int64_t i_expert, const char * what,
                        const char * remedy = "the checkpoint is damaged, download it again");

    std::string                  name_;
    Shape                        shape_;
    std::vector<const uint8_t *> codes_;
    std::vector<FilePiece>       origin_;
    std::shared_ptr<ExpertCopy>  copy_;
    std::shared_ptr<void>        held_;
    BlockScales                  scales_;
    std::shared_ptr<const void>  keep_alive_;
    std::vector<ScaleCandidate>  candidates_;             // empty once the scales are certain
    std::mutex                   choice_;                 // guards candidates_ and scales_ until then
    size_t                       grid_len_   = 0;         // scales per expert
    size_t                       map_bytes_  = 0;
    float *                      scale_      = nullptr;  // [n_expert][grid_len_], pages appear as experts get ready
    std::unique_ptr<std::atomic<bool>[]> ready_;
    std::atomic<const char *>    rejected_{nullptr};     // leaked on purpose: at most one sentence per tensor
};

}  // namespace hybrid_moe
