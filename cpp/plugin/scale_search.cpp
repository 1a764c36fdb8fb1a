// Mapped and open files -> trailer -> ExpertTensor.
#include "plugin/scale_search.h"

#include "checkpoint/trailer.h"
#include "plugin/mapped_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <tuple>

namespace hybrid_moe {
namespace {

constexpr const char * remedy = "load it through hybrid_moe_ext, or convert it again with `hybrid-moe convert`";

// The file ends somewhere in the last page, which is zero from there on; our footer ends with no zero.
uint64_t file_size_of(const MappedFile & m) {
    uint64_t size = m.size;
    const uint64_t page = uint64_t(sysconf(_SC_PAGESIZE));
    const uint64_t stop = size > page ? size - page : 0;
    while (size > stop && m.base[size - 1] == 0) size--;
    return size;
}

Trailer::Reader reader_of(const MappedFile & m) {
    return [m](uint64_t offset, size_t n, void * out) {
        if (offset > m.size || n > m.size - offset) return false;
        memcpy(out, m.base + offset, n);
        return true;
    };
}

Trailer::Reader reader_of(int fd) {
    return [fd](uint64_t offset, size_t n, void * out) {
        uint8_t * to = static_cast<uint8_t *>(out);
        while (n > 0) {
            const ssize_t got = pread(fd, to, n, off_t(offset));
            if (got <= 0) return false;
            to += got;
            offset += uint64_t(got);
            n -= size_t(got);
        }
        return true;
    };
}

// Trailers in use, so that the tensors of one model share one.
std::mutex cache_mutex;
std::map<std::tuple<uint64_t, uint64_t, uint64_t>, std::weak_ptr<const Trailer>> cache;

// Null when the file needs none.
std::shared_ptr<const Trailer> mapped_trailer(const MappedFile & m) {
    const std::lock_guard<std::mutex> lock(cache_mutex);
    std::weak_ptr<const Trailer> & slot = cache[{0, uintptr_t(m.base), m.size}];
    std::shared_ptr<const Trailer> trailer = slot.lock();
    // The address may have belonged to another file before: a cached trailer must still be the one in the mapping.
    if (!trailer || !trailer->same_as(reader_of(m), file_size_of(m))) {
        slot = trailer = Trailer::of_gguf(reader_of(m), file_size_of(m));
    }
    return trailer;
}

// Closes with the last user.
struct OpenFile {
    int fd;
    explicit OpenFile(int f) : fd(f) {}
    ~OpenFile() { close(fd); }
    OpenFile(const OpenFile &) = delete;
    OpenFile & operator=(const OpenFile &) = delete;
};

struct OpenModel {
    std::shared_ptr<OpenFile>      file;
    std::shared_ptr<const Trailer> trailer;
};

// One descriptor of ours per file, however many tensors wait for their first use with it.
std::map<FileId, std::weak_ptr<OpenFile>> our_files;

std::shared_ptr<OpenFile> open_again(const std::string & path, const FileId & id) {
    const std::lock_guard<std::mutex> lock(cache_mutex);
    std::weak_ptr<OpenFile> & slot = our_files[id];
    std::shared_ptr<OpenFile> file = slot.lock();
    if (!file) {
        const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (fd < 0) return nullptr;
        slot = file = std::make_shared<OpenFile>(fd);
    }
    return file;
}

// Throws std::runtime_error; null when the file needs no trailer.
std::shared_ptr<const Trailer> trailer_of(const OpenFile & file, const FileId & id, uint64_t size) {
    const std::lock_guard<std::mutex> lock(cache_mutex);
    std::weak_ptr<const Trailer> & slot = cache[{id.device, id.inode, size}];
    std::shared_ptr<const Trailer> trailer = slot.lock();
    if (!trailer || !trailer->same_as(reader_of(file.fd), size)) slot = trailer = Trailer::of_gguf(reader_of(file.fd), size);
    return trailer;
}

// Models whose experts have not all been used yet keep such descriptors: what they are of is not being loaded.
bool is_our_own(int fd) {
    const std::lock_guard<std::mutex> lock(cache_mutex);
    for (const auto & [id, file] : our_files) {
        const std::shared_ptr<OpenFile> alive = file.lock();
        if (alive && alive->fd == fd) return true;
    }
    return false;
}

std::string path_of(const std::string & link) {
    char path[4096];
    const ssize_t n = readlink(link.c_str(), path, sizeof path);
    return n > 0 ? std::string(path, size_t(n)) : link;
}

// By the host's own descriptor, which may be O_DIRECT: a file that is not ours is not opened anew, because closing a
// second descriptor would release the host's record locks on it.
bool begins_like_gguf(int fd) {
    alignas(4096) char block[4096];
    return pread(fd, block, sizeof block, 0) >= 4 && !memcmp(block, "GGUF", 4);
}

// Every FP8 GGUF that this process has open. Opened anew: the host may have its own with O_DIRECT, and closes it after
// the load. `faults` gets a sentence per damaged one.
std::vector<OpenModel> open_models(std::string & faults) {
    std::vector<OpenModel> out;
    std::set<FileId> seen;
    std::unique_ptr<DIR, int (*)(DIR *)> dir(opendir("/proc/self/fd"), closedir);
    while (dirent * entry = dir ? readdir(dir.get()) : nullptr) {
        const std::string path = std::string("/proc/self/fd/") + entry->d_name;
        struct stat st;
        if (stat(path.c_str(), &st) != 0 || !S_ISREG(st.st_mode)) continue;
        const FileId id = {uint64_t(st.st_dev), uint64_t(st.st_ino)};
        if (seen.count(id)) continue;
        const int fd = atoi(entry->d_name);
        if (is_our_own(fd) || !begins_like_gguf(fd)) continue;
        const std::shared_ptr<OpenFile> file = open_again(path, id);
        if (!file) continue;
        seen.insert(id);
        try {
            if (auto trailer = trailer_of(*file, id, uint64_t(st.st_size))) out.push_back({file, std::move(trailer)});
        } catch (const std::exception & e) {
            faults += (faults.empty() ? "" : "; ") + path_of(path) + ": " + e.what();
        }
    }
    return out;
}

bool fits(const Trailer::Entry * e, const ExpertTensor::Shape & s) {
    return e && e->n_expert == s.n_expert && e->n_rows == s.n_rows && e->k == s.k;
}

std::vector<const uint8_t *> in_one_piece(const ExpertTensor::Shape & s, const uint8_t * data) {
    std::vector<const uint8_t *> out;
    for (int64_t i = 0; i < s.n_expert; i++) out.push_back(data + size_t(i) * size_t(s.n_rows) * s.row_bytes);
    return out;
}

std::unique_ptr<ExpertTensor> from_mapping(const std::string & name, const ExpertTensor::Shape & shape,
                                           const uint8_t * data, const MappedFile & m) {
    const std::shared_ptr<const Trailer> trailer = mapped_trailer(m);
    const Trailer::Entry * e = trailer ? trailer->find(name) : nullptr;
    if (!fits(e, shape) || m.base + e->data_offset != data) {
        throw std::runtime_error(m.path + ": tensor '" + name + "' is not in its FP8 trailer as it is in the file; " + remedy);
    }
    auto tensor = std::make_unique<ExpertTensor>(name, shape, in_one_piece(shape, data), trailer->scales(*e), trailer);
    tensor->set_origin({piece_of(m, data, uint64_t(shape.n_expert) * uint64_t(shape.n_rows) * shape.row_bytes)});
    return tensor;
}

}  // namespace

std::shared_ptr<const void> check_mapped_model(const void * ptr) {
    const MappedFile m = mapping_around(ptr);
    if (!m.base) return nullptr;
    try {
        return mapped_trailer(m);
    } catch (const std::exception & e) {
        throw std::runtime_error(m.path + ": " + e.what());
    }
}

std::unique_ptr<ExpertTensor> find_scales(const std::string & name, const ExpertTensor::Shape & shape, const uint8_t * data) {
    const MappedFile m = mapping_around(data);
    if (m.base) return from_mapping(name, shape, data, m);
    std::vector<ScaleCandidate> candidates;
    std::string faults;
    for (const OpenModel & model : open_models(faults)) {
        const Trailer::Entry * e = model.trailer->find(name);
        if (!fits(e, shape)) continue;
        const std::shared_ptr<OpenFile> file = model.file;
        const std::shared_ptr<const Trailer> trailer = model.trailer;
        const uint64_t base = e->data_offset;
        candidates.push_back({trailer->scales(*e), trailer, [file, base](uint64_t offset, size_t n, void * out) {
                                  return reader_of(file->fd)(base + offset, n, out);
                              }});
    }
    if (candidates.empty()) {
        if (!faults.empty()) throw std::runtime_error(faults);
        throw std::runtime_error("tensor '" + name + "' holds FP8 codes, and no open file has their scales; " + remedy);
    }
    return std::make_unique<ExpertTensor>(name, shape, in_one_piece(shape, data), std::move(candidates));
}

}  // namespace hybrid_moe
