// Read-only memory maps of checkpoint files, closed when the last user lets go. Knows no formats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace hybrid_moe {

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

private:
    std::string     path_;
    const uint8_t * data_ = nullptr;
    size_t          size_ = 0;
};

}  // namespace hybrid_moe
