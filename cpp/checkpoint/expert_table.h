// What one load of a checkpoint knows of its experts: which GGUF tensor name stands for which bytes of which files.
// Filled by the Python side, used while the host creates its tensors. No ggml.
#pragma once

#include "checkpoint/mapping.h"
#include "moe/expert_tensor.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace hybrid_moe {

// Where an expert's bytes are: file number and offset.
struct FileRange {
    int32_t  file;
    uint64_t offset;
};

class ExpertTable {
public:
    // `copied`: the host loads the experts' bytes into its tensors, only scales come from the files. Otherwise the
    // tensors' own memory stays empty and the bytes are used where they lie.
    explicit ExpertTable(bool copied) : copied_(copied) {}

    // Maps a file. Returns its number. Throws std::runtime_error.
    int add_file(const std::string & path);

    // Declares a tensor: `codes` and (FP8) `scales` hold one range per expert. Throws std::runtime_error when a range
    // leaves its file, a shape is not positive, or the name is taken.
    void add_tensor(const std::string & name, const ExpertTensor::Shape & shape, const std::vector<FileRange> & codes,
                    ScaleType scale_type, int64_t block_rows, int64_t block_k, const std::vector<FileRange> & scales);

    // A new ExpertTensor for a name whose tensor has its memory at `data`, or null when the name is not ours. Counts
    // the name as bound.
    std::unique_ptr<ExpertTensor> bind(const std::string & name, const uint8_t * data);

    int n_tensors() const { return int(tensors_.size()); }
    int n_bound() const;

    // The table that tensors created on this thread belong to: set around one load, so that two models of the same
    // checkpoint never meet.
    static std::shared_ptr<ExpertTable> & loading();

private:
    struct Entry {
        ExpertTensor::Shape          shape;
        std::vector<const uint8_t *> codes;
        std::vector<FilePiece>       origin;
        BlockScales                  scales;
        bool                         bound = false;
    };
    const uint8_t * at(const std::string & name, FileRange range, uint64_t n_bytes) const;

    std::shared_ptr<std::vector<std::unique_ptr<Mapping>>> files_ =
        std::make_shared<std::vector<std::unique_ptr<Mapping>>>();
    std::map<std::string, Entry> tensors_;
    const bool copied_;
};

}  // namespace hybrid_moe
