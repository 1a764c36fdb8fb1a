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

Mapping::Mapping(const std::string & path) : path_(path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) throw std::runtime_error(path + ": cannot be opened: " + strerror(errno));
    struct stat st;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        close(fd);
        throw std::runtime_error(path + ": is not a regular file");
    }
    size_ = size_t(st.st_size);
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
