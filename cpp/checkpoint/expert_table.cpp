// ExpertTable: ranges checked against the mapped files.
#include "checkpoint/expert_table.h"

#include <stdexcept>
#include <utility>

namespace hybrid_moe {
namespace {

std::string quoted(const std::string & name) { return "tensor '" + name + "'"; }

// Positive, and small enough that products of three fit into 64 bits.
bool is_sane_extent(int64_t v) { return v > 0 && v < (int64_t(1) << 20); }

}  // namespace

int ExpertTable::add_file(const std::string & path) {
    files_->push_back(std::make_unique<Mapping>(path));
    return int(files_->size()) - 1;
}

const uint8_t * ExpertTable::at(const std::string & name, FileRange range, uint64_t n_bytes) const {
    if (range.file < 0 || size_t(range.file) >= files_->size()) {
        throw std::runtime_error(quoted(name) + ": file number " + std::to_string(range.file) + " does not exist");
    }
    const Mapping & file = *(*files_)[size_t(range.file)];
    if (range.offset > file.size() || n_bytes > file.size() - range.offset) {
        throw std::runtime_error(file.path() + ": " + quoted(name) + " needs bytes up to " +
                                 std::to_string(range.offset + n_bytes) + ", the file has " +
                                 std::to_string(file.size()) + ": it is cut short, download it again");
    }
    return file.data() + range.offset;
}

void ExpertTable::add_tensor(const std::string & name, const ExpertTensor::Shape & shape,
                             const std::vector<FileRange> & codes, ScaleType scale_type, int64_t block_rows,
                             int64_t block_k, const std::vector<FileRange> & scales) {
    if (!is_sane_extent(shape.n_expert) || !is_sane_extent(shape.n_rows) ||
        !is_sane_extent(shape.k)) {
        throw std::runtime_error(quoted(name) + ": experts, rows and columns must be positive");
    }
    const bool is_fp8 = shape.type == WeightType::fp8_e4m3;
    if (is_fp8 && (block_rows <= 0 || block_k <= 0)) {
        throw std::runtime_error(quoted(name) + ": FP8 needs a scale block of positive size");
    }
    Entry entry;
    entry.shape = shape;
    const uint64_t expert_bytes = uint64_t(shape.n_rows) * shape.row_bytes;
    for (const FileRange & r : codes) {
        entry.codes.push_back(at(name, r, expert_bytes));
        entry.origin.push_back((*files_)[size_t(r.file)]->piece(r.offset, expert_bytes));
    }
    if (is_fp8) {
        const uint64_t grid = uint64_t((shape.n_rows + block_rows - 1) / block_rows) *
                              uint64_t((shape.k + block_k - 1) / block_k);
        entry.scales.type       = scale_type;
        entry.scales.block_rows = block_rows;
        entry.scales.block_k    = block_k;
        for (const FileRange & r : scales) {
            entry.scales.of_expert.push_back(at(name, r, grid * scale_bytes(scale_type)));
        }
    }
    if (!tensors_.emplace(name, std::move(entry)).second) {
        throw std::runtime_error(quoted(name) + " is declared twice");
    }
}

std::unique_ptr<ExpertTensor> ExpertTable::bind(const std::string & name, const uint8_t * data) {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) return nullptr;
    Entry & e = found->second;
    std::vector<const uint8_t *> codes = e.codes;
    for (size_t i = 0; copied_ && i < codes.size(); i++) {
        codes[i] = data + i * size_t(e.shape.n_rows) * e.shape.row_bytes;
    }
    auto tensor = std::make_unique<ExpertTensor>(name, e.shape, std::move(codes), e.scales, files_);
    if (!copied_) tensor->set_origin(e.origin);
    e.bound = true;
    return tensor;
}

int ExpertTable::n_bound() const {
    int n = 0;
    for (const auto & t : tensors_) n += t.second.bound;
    return n;
}

std::shared_ptr<ExpertTable> & ExpertTable::loading() {
    thread_local std::shared_ptr<ExpertTable> table;
    return table;
}

}  // namespace hybrid_moe
