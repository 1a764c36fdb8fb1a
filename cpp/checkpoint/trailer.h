// The FP8 scales at the end of a GGUF file (docs/fp8-gguf.md, version 1): table, scales, footer. Parsing only: where
// the bytes come from is the caller's business.
#pragma once

#include "checkpoint/gguf_header.h"
#include "moe/expert_tensor.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace hybrid_moe {

constexpr size_t   trailer_footer_bytes = 48;
constexpr uint32_t trailer_version      = 1;

class Trailer {
public:
    struct Entry {
        int64_t   n_expert;
        int64_t   n_rows;
        int64_t   k;
        int64_t   block_rows;
        int64_t   block_k;
        ScaleType scale_type;
        uint64_t  data_offset;   // of the codes, in the file
        size_t    scale_offset;  // into bytes_
    };

    using Reader = FileReader;

    // From a file of `file_size` bytes. Throws std::runtime_error with one sentence: no trailer, truncated, another
    // version, wrong checksum, or a table that contradicts itself.
    static std::shared_ptr<const Trailer> read(const Reader & reader, uint64_t file_size);

    // The trailer of a GGUF file that must have one, by its mark or by experts of type I8, checked against the file's
    // own list of tensors; null for every other file. Throws as read() does.
    static std::shared_ptr<const Trailer> of_gguf(const Reader & reader, uint64_t file_size);

    // The footer alone: false when the file has none (an ordinary GGUF).
    static bool present(const Reader & reader, uint64_t file_size);

    // Whether the file still holds this very trailer, by its footer.
    bool same_as(const Reader & reader, uint64_t file_size) const;

    const Entry * find(const std::string & name) const;

    // Scales of `entry` that point into this trailer.
    BlockScales scales(const Entry & entry) const;

private:
    void parse_table();
    void check_tensors(const GgufHeader & header) const;

    std::vector<uint8_t> bytes_;  // table and scales
    uint64_t             offset_ = 0;
    uint32_t             crc_    = 0;
    std::map<std::string, Entry> entries_;
};
}  // namespace hybrid_moe
