// Read-only memory maps of checkpoint files, closed when the last user lets go. Knows no formats.
#pragma once

#include "moe/expert_copy.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

struct stat;

namespace hybrid_moe {

// When a file was last written to, in nanoseconds.
uint64_t changed_at(const struct stat & st);

// A whole file in memory by mmap (MAP_SHARED, read-only): models and processes share one page-cache copy. Shrinking
// the file while it is mapped kills the process on access (SIGBUS), as with every mmap.
class Mapping {
public:
    // Throws std::runtime_error naming the file and the system's reason.
    explicit Mapping(const std::string & path);
    ~Mapping();
    Mapping(const Mapping &) = delete;
    Mapping & operator=(const Mapping &) = delete;

    const uint8_t * data() const { return data_; }
    size_t size() const { return size_; }
    const std::string & path() const { return path_; }
    // What n bytes at `offset` are called in the registry of copies.
    FilePiece piece(uint64_t offset, uint64_t n) const;

private:
    std::string     path_;
    const uint8_t * data_ = nullptr;
    size_t          size_ = 0;
    FilePiece       whole_{};
};

}  // namespace hybrid_moe
