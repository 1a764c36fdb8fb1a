// Which file a host's mapping is of.
#pragma once

#include "moe/expert_copy.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>

namespace hybrid_moe {

struct FileId {
    uint64_t device = 0;
    uint64_t inode  = 0;
    bool operator<(const FileId & o) const { return std::tie(device, inode) < std::tie(o.device, o.inode); }
    bool operator==(const FileId & o) const { return device == o.device && inode == o.inode; }
};

// A file mapped in one piece, as llama.cpp maps models (several lines of maps when parts were advised differently).
struct MappedFile {
    const uint8_t * base = nullptr;  // of file offset 0
    size_t          size = 0;        // whole pages
    std::string     path;
    FileId          id;
};

// The mapping around an address; base is null when the address lies in no file or its beginning is not mapped.
MappedFile mapping_around(const void * address);

// What n bytes of it are called in the registry of copies.
FilePiece piece_of(const MappedFile & m, const uint8_t * data, uint64_t n_bytes);

}  // namespace hybrid_moe
