// read_gguf_header: a cursor that reads the file in pieces and never believes a length.
#include "checkpoint/gguf_header.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace hybrid_moe {
namespace {

constexpr uint32_t type_string = 8;
constexpr uint32_t type_array  = 9;
constexpr uint32_t scalar_bytes[13] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};  // by gguf_type
constexpr uint64_t max_name = 1 << 16;

struct NoHeader : std::runtime_error {
    NoHeader() : std::runtime_error("no GGUF header") {}
};

class Cursor {
public:
    Cursor(const FileReader & reader, uint64_t file_size) : reader_(reader), size_(file_size) {}

    uint64_t at() const { return at_; }

    void skip(uint64_t n) {
        if (n > size_ - at_) throw NoHeader();
        at_ += n;
    }

    template <class T> T get() {
        T v;
        copy(sizeof v, &v);
        return v;
    }

    std::string text() {
        const uint64_t n = get<uint64_t>();
        if (n > max_name) throw NoHeader();
        std::string s(size_t(n), '\0');
        copy(s.size(), s.data());
        return s;
    }

    void skip_text() { skip(get<uint64_t>()); }

private:
    void copy(size_t n, void * out) {
        if (n > size_ - at_) throw NoHeader();
        if (at_ < window_at_ || at_ + n > window_at_ + window_.size()) {
            window_.resize(size_t(std::min<uint64_t>(std::max<uint64_t>(n, 1 << 16), size_ - at_)));
            window_at_ = at_;
            if (!reader_(at_, window_.size(), window_.data())) throw NoHeader();
        }
        memcpy(out, window_.data() + (at_ - window_at_), n);
        at_ += n;
    }

    const FileReader &   reader_;
    const uint64_t       size_;
    uint64_t             at_        = 0;
    uint64_t             window_at_ = 0;
    std::vector<uint8_t> window_;
};

void skip_value(Cursor & c, uint32_t type) {
    if (type == type_string) {
        c.skip_text();
    } else if (type == type_array) {
        const uint32_t item = c.get<uint32_t>();
        const uint64_t n    = c.get<uint64_t>();
        if (item == type_string) {
            for (uint64_t i = 0; i < n; i++) c.skip_text();
        } else if (item < 13 && scalar_bytes[item] && n < (uint64_t(1) << 60)) {
            c.skip(n * scalar_bytes[item]);
        } else {
            throw NoHeader();
        }
    } else if (type < 13 && scalar_bytes[type]) {
        c.skip(scalar_bytes[type]);
    } else {
        throw NoHeader();
    }
}

GgufHeader read(Cursor & c) {
    if (c.get<uint32_t>() != 0x46554747) throw NoHeader();  // "GGUF"
    const uint32_t version = c.get<uint32_t>();
    if (version != 2 && version != 3) throw NoHeader();
    const uint64_t n_tensors = c.get<uint64_t>();
    const uint64_t n_kv      = c.get<uint64_t>();
    GgufHeader header;
    uint64_t alignment = 32;
    for (uint64_t i = 0; i < n_kv; i++) {
        const std::string key  = c.text();
        const uint32_t    type = c.get<uint32_t>();
        if (key == "hybrid_moe.fp8.version") header.has_fp8_mark = true;
        if (key == "general.alignment" && type == 4) {
            alignment = c.get<uint32_t>();
        } else {
            skip_value(c, type);
        }
    }
    if (alignment == 0) throw NoHeader();
    for (uint64_t i = 0; i < n_tensors; i++) {
        GgufTensor t{c.text(), 0, {1, 1, 1, 1}, 0};
        const uint32_t n_dims = c.get<uint32_t>();
        if (n_dims > 4) throw NoHeader();
        for (uint32_t d = 0; d < n_dims; d++) t.ne[d] = c.get<uint64_t>();
        t.type   = c.get<uint32_t>();
        t.offset = c.get<uint64_t>();
        header.tensors.push_back(std::move(t));
    }
    const uint64_t data = (c.at() + alignment - 1) / alignment * alignment;
    for (GgufTensor & t : header.tensors) t.offset += data;
    return header;
}

}  // namespace

std::optional<GgufHeader> read_gguf_header(const FileReader & reader, uint64_t file_size) {
    Cursor c(reader, file_size);
    try {
        return read(c);
    } catch (const NoHeader &) {
        return std::nullopt;
    }
}

}  // namespace hybrid_moe
