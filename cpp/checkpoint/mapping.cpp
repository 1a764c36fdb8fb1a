// Mapping by open, fstat, mmap.
#include "mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace hybrid_moe {

uint64_t changed_at(const struct stat & st) { return uint64_t(st.st_mtim.tv_sec) * 1000000000u + uint64_t(st.st_mtim.tv_nsec); }

FilePiece Mapping::piece(uint64_t offset, uint64_t n) const {
    FilePiece p = whole_;
    p.offset  = offset;
    p.n_bytes = n;
    return p;
}

Mapping::Mapping(const std::string & path) : path_(path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) throw std::runtime_error(path + ": cannot be opened: " + strerror(errno));
    struct stat st;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        close(fd);
        throw std::runtime_error(path + ": is not a regular file");
    }
    size_  = size_t(st.st_size);
    whole_ = {uint64_t(st.st_dev), uint64_t(st.st_ino), changed_at(st), 0, size_};
    if (size_ != 0) {
        void * p = mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd, 0);
        const int why = errno;
        close(fd);
        if (p == MAP_FAILED) throw std::runtime_error(path + ": cannot be mapped: " + strerror(why));
        data_ = static_cast<const uint8_t *>(p);
    } else {
        close(fd);
    }
}

Mapping::~Mapping() {
    if (data_) munmap(const_cast<uint8_t *>(data_), size_);
}

}  // namespace hybrid_moe
