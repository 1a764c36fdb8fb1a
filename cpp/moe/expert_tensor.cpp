// ExpertTensor: pointers per expert and the first-use check.
#include "moe/expert_tensor.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace hybrid_moe {
namespace {

float scale_at(const uint8_t * grid, ScaleType type, size_t i) {
    if (type == ScaleType::f32) {
        float f;
        memcpy(&f, grid + 4 * i, sizeof f);
        return f;
    }
    if (type == ScaleType::e8m0) return grid[i] == 255 ? NAN : ldexpf(1.0f, int(grid[i]) - 127);
    uint16_t h;
    memcpy(&h, grid + 2 * i, sizeof h);
    const uint32_t bits = uint32_t(h) << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

// Experts come from disk at their first use: ask for the whole range at once instead of page by page.
void read_ahead(const uint8_t * p, size_t n) {
    const uintptr_t page  = uintptr_t(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = uintptr_t(p) & ~(page - 1);
    madvise(reinterpret_cast<void *>(begin), uintptr_t(p) + n - begin, MADV_WILLNEED);  // advice: may fail
}

// Bytes that have been copied: the kernel may take these pages before others. Nothing is lost that way.
void will_not_need(const uint8_t * p, size_t n) {
#ifdef MADV_COLD
    const uintptr_t page  = uintptr_t(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = (uintptr_t(p) + page - 1) & ~(page - 1);
    const uintptr_t end   = (uintptr_t(p) + n) & ~(page - 1);
    if (begin < end) madvise(reinterpret_cast<void *>(begin), end - begin, MADV_COLD);
#endif
}

}  // namespace

ExpertTensor::ExpertTensor(std::string name, const Shape & shape, std::vector<const uint8_t *> of_expert,
                           BlockScales scales, std::shared_ptr<const void> keep_alive)
    : name_(std::move(name)), shape_(shape), codes_(std::move(of_expert)), scales_(std::move(scales)),
      keep_alive_(std::move(keep_alive)) {
    allocate_scales();
}

ExpertTensor::ExpertTensor(std::string name, const Shape & shape, std::vector<const uint8_t *> of_expert,
                           std::vector<ScaleCandidate> candidates)
    : name_(std::move(name)), shape_(shape), codes_(std::move(of_expert)), scales_(candidates.at(0).scales),
      candidates_(std::move(candidates)) {
    allocate_scales();
}

void ExpertTensor::allocate_scales() {
    if (shape_.type != WeightType::fp8_e4m3) return;
    const int64_t br = scales_.block_rows;
    const int64_t bk = scales_.block_k;
    grid_len_  = size_t((shape_.n_rows + br - 1) / br) * size_t((shape_.k + bk - 1) / bk);
    map_bytes_ = grid_len_ * size_t(shape_.n_expert) * sizeof(float);
    void * p = mmap(nullptr, map_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::runtime_error(name_ + ": no address space for its scales");
    scale_ = static_cast<float *>(p);
    expect_first_use();
}

void ExpertTensor::expect_first_use() {
    if (!ready_) ready_.reset(new std::atomic<bool>[size_t(shape_.n_expert)]());
}

bool ExpertTensor::copy_to_memory(const ArenaSource & source) {
    if (!origin_.empty()) copy_ = shared_copy(name_, origin_, shape_.n_expert, shape_.n_rows, shape_.row_bytes, source);
    if (copy_) expect_first_use();
    return bool(copy_);
}

const std::vector<RowPart> & ExpertTensor::parts() const {
    static const std::vector<RowPart> none;
    return copy_ ? copy_->parts() : none;
}

ExpertTensor::~ExpertTensor() {
    if (scale_) munmap(scale_, map_bytes_);
}

ExpertMatrix ExpertTensor::matrix(int64_t i_expert, int64_t row, int64_t & row_end) const {
    ExpertMatrix e;
    row_end      = shape_.n_rows;
    e.type       = shape_.type;
    e.w          = copy_ ? copy_->rows_at(i_expert, row, row_end) : codes_[size_t(i_expert)];
    e.row_bytes  = shape_.row_bytes;
    e.n_rows     = shape_.n_rows;
    e.k          = shape_.k;
    e.scale      = scale_ ? scale_ + grid_len_ * size_t(i_expert) : nullptr;
    e.block_rows = scales_.block_rows;
    e.block_k    = scales_.block_k;
    return e;
}

const char * ExpertTensor::reject(int64_t i_expert, const char * what, const char * remedy) {
    const char * already = rejected_.load(std::memory_order_acquire);
    if (already) return already;
    char text[512];
    snprintf(text, sizeof text, "tensor %s, expert %lld: %s; %s", name_.c_str(),
             static_cast<long long>(i_expert), what, remedy);
    const char * mine = strdup(text);
    if (rejected_.compare_exchange_strong(already, mine)) return mine;
    free(const_cast<char *>(mine));
    return already;
}

// Keeps the one candidate whose codes are this tensor's. Same codes under several names are the same model when their
// scales agree; when they do not, nobody can tell, and a guess would give wrong tokens.
const char * ExpertTensor::choose_scales(int64_t i_expert) {
    const std::lock_guard<std::mutex> lock(choice_);
    if (candidates_.empty()) return nullptr;
    const size_t n = size_t(shape_.n_rows) * shape_.row_bytes;
    std::vector<uint8_t> theirs(n);
    std::vector<ScaleCandidate> same;
    for (const ScaleCandidate & c : candidates_) {
        if (c.scales.block_rows != scales_.block_rows || c.scales.block_k != scales_.block_k) continue;
        if (c.read_codes(uint64_t(i_expert) * n, n, theirs.data()) &&
            !memcmp(theirs.data(), codes_[size_t(i_expert)], n)) {
            same.push_back(c);
        }
    }
    if (same.empty()) {
        return reject(i_expert, "no FP8 GGUF that was open while it was loaded has these codes",
                      "convert the checkpoint again, or load the model with mmap on");
    }
    for (const ScaleCandidate & c : same) {
        for (size_t e = 0; e < c.scales.of_expert.size(); e++) {
            if (c.scales.type != same[0].scales.type ||
                memcmp(c.scales.of_expert[e], same[0].scales.of_expert[e], grid_len_ * scale_bytes(c.scales.type))) {
                return reject(i_expert, "two FP8 GGUFs that were open while it was loaded have these codes with different scales",
                              "close the other one first, or load the model with mmap on");
            }
        }
    }
    scales_     = same[0].scales;
    keep_alive_ = same[0].keep_alive;
    candidates_.clear();
    return nullptr;
}

const char * ExpertTensor::expand_scales(int64_t i_expert) {
    if (const char * unknown = choose_scales(i_expert)) return unknown;
    float * to = scale_ + grid_len_ * size_t(i_expert);
    for (size_t i = 0; i < grid_len_; i++) {
        const float s = scale_at(scales_.of_expert[size_t(i_expert)], scales_.type, i);
        if (!std::isfinite(s)) return reject(i_expert, "a block scale is not finite");
        to[i] = s;
    }
    return nullptr;
}

const char * ExpertTensor::make_ready(int64_t i_expert, const Kernels & kernels) {
    if (const char * already = rejected_.load(std::memory_order_acquire)) return already;
    const size_t n = size_t(shape_.n_rows) * shape_.row_bytes;
    const uint8_t * codes = codes_[size_t(i_expert)];
    // What another model of the same file has copied, it has also checked: the file need not be read again.
    const bool is_known_good = copy_ && copy_->has(i_expert);
    if (!is_known_good) read_ahead(codes, n);
    if (scale_) {
        if (const char * what = expand_scales(i_expert)) return what;
        if (!is_known_good && kernels.has_fp8_nan(codes, n)) return reject(i_expert, "a weight is NaN (E4M3 code 0x7F or 0xFF)");
    }
    if (copy_ && !is_known_good) {
        copy_->fetch(i_expert, codes);
        will_not_need(codes, n);
    }
    ready_[size_t(i_expert)].store(true, std::memory_order_release);
    return nullptr;
}

}  // namespace hybrid_moe
