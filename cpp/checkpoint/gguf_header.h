// What the plug-in must know of a GGUF file's header besides what the host tells it: the mark of FP8 files and where its
// tensors lie. Values and arrays are stepped over.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace hybrid_moe {

// Reads n bytes at `offset` of a file into `out`; false when they cannot be had.
using FileReader = std::function<bool(uint64_t offset, size_t n, void * out)>;

struct GgufTensor {
    std::string name;
    uint32_t    type;    // ggml_type
    uint64_t    ne[4];   // row length first; 1 where the file has fewer dimensions
    uint64_t    offset;  // in the file
};

struct GgufHeader {
    bool                    has_fp8_mark = false;  // KV hybrid_moe.fp8.version
    std::vector<GgufTensor> tensors;
};

// Nothing when it is no GGUF (version 2 or 3) or its header leads nowhere: such files are the host's to refuse.
std::optional<GgufHeader> read_gguf_header(const FileReader & reader, uint64_t file_size);

}  // namespace hybrid_moe
