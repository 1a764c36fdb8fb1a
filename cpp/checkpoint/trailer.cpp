// Trailer: footer, checksum, table. Little-endian, as GGUF is.
#include "checkpoint/trailer.h"

#include <array>
#include <cstring>
#include <set>
#include <stdexcept>

namespace hybrid_moe {
namespace {

constexpr char magic[8] = {'H', 'M', 'O', 'E', 'F', 'P', '8', '\n'};
constexpr const char * remedy = "; convert the checkpoint again";

// CRC-32 (IEEE 802.3), as zlib computes it.
uint32_t crc32(const uint8_t * p, size_t n) {
    static const std::array<uint32_t, 256> table = [] {
        std::array<uint32_t, 256> t{};
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t c = i;
            for (int bit = 0; bit < 8; bit++) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
            t[i] = c;
        }
        return t;
    }();
    uint32_t c = ~0u;
    for (size_t i = 0; i < n; i++) c = table[(c ^ p[i]) & 255] ^ (c >> 8);
    return ~c;
}

template <class T> T load(const uint8_t * p) {
    T v;
    memcpy(&v, p, sizeof v);
    return v;
}

struct Footer {
    uint32_t version;
    uint32_t crc;
    uint64_t offset;
    uint64_t length;
};

bool read_footer(const Trailer::Reader & reader, uint64_t file_size, Footer & out) {
    uint8_t raw[trailer_footer_bytes];
    if (file_size < sizeof raw || !reader(file_size - sizeof raw, sizeof raw, raw)) return false;
    if (memcmp(raw, magic, sizeof magic) != 0 || memcmp(raw + sizeof raw - sizeof magic, magic, sizeof magic) != 0) {
        return false;
    }
    out = {load<uint32_t>(raw + 8), load<uint32_t>(raw + 12), load<uint64_t>(raw + 16), load<uint64_t>(raw + 24)};
    return true;
}

// A cursor over the table that never leaves it.
struct Cursor {
    const uint8_t * p;
    size_t          left;

    const uint8_t * take(size_t n) {
        if (n > left) throw std::runtime_error(std::string("the FP8 trailer's table is cut short") + remedy);
        const uint8_t * at = p;
        p += n;
        left -= n;
        return at;
    }
    template <class T> T get() { return load<T>(take(sizeof(T))); }
};

// An expert tensor of codes, as llama.cpp names them.
bool holds_codes(const GgufTensor & t) {
    constexpr uint32_t ggml_type_i8 = 24;
    return t.type == ggml_type_i8 && t.ne[3] == 1 && t.name.find("_exps.") != std::string::npos;
}

}  // namespace

bool Trailer::present(const Reader & reader, uint64_t file_size) {
    Footer footer;
    return read_footer(reader, file_size, footer);
}

std::shared_ptr<const Trailer> Trailer::read(const Reader & reader, uint64_t file_size) {
    Footer footer;
    if (!read_footer(reader, file_size, footer)) {
        throw std::runtime_error(std::string("it has FP8 experts but no trailer with their scales at its end: it is cut "
                                             "short or was rewritten by a tool that does not know it") + remedy);
    }
    if (footer.version != trailer_version) {
        throw std::runtime_error("its FP8 trailer has version " + std::to_string(footer.version) + ", this plug-in reads " +
                                 std::to_string(trailer_version) + "; update hybrid-moe-ext or convert the checkpoint again");
    }
    const uint64_t end = file_size - trailer_footer_bytes;
    if (footer.offset > end || footer.length != end - footer.offset) {
        throw std::runtime_error(std::string("its FP8 trailer does not lie where its footer says") + remedy);
    }
    auto trailer = std::make_shared<Trailer>();
    trailer->offset_ = footer.offset;
    trailer->crc_    = footer.crc;
    trailer->bytes_.resize(size_t(footer.length));
    if (!reader(footer.offset, trailer->bytes_.size(), trailer->bytes_.data())) {
        throw std::runtime_error("its FP8 trailer cannot be read");
    }
    if (crc32(trailer->bytes_.data(), trailer->bytes_.size()) != footer.crc) {
        throw std::runtime_error(std::string("the checksum of its FP8 trailer is wrong: the file is damaged") + remedy);
    }
    trailer->parse_table();
    return trailer;
}

std::shared_ptr<const Trailer> Trailer::of_gguf(const Reader & reader, uint64_t file_size) {
    const std::optional<GgufHeader> header = read_gguf_header(reader, file_size);
    if (!header) return nullptr;
    bool is_fp8 = header->has_fp8_mark;
    for (const GgufTensor & t : header->tensors) is_fp8 = is_fp8 || holds_codes(t);
    if (!is_fp8) return nullptr;
    std::shared_ptr<const Trailer> trailer = read(reader, file_size);
    trailer->check_tensors(*header);
    return trailer;
}

// Both ways: scales for something else mean that table and tensors are of two files.
void Trailer::check_tensors(const GgufHeader & header) const {
    std::set<std::string> seen;
    for (const GgufTensor & t : header.tensors) {
        if (!holds_codes(t)) continue;
        seen.insert(t.name);
        const Entry * e = find(t.name);
        if (!e) throw std::runtime_error("its FP8 trailer has no scales for tensor '" + t.name + "'" + remedy);
        if (uint64_t(e->k) != t.ne[0] || uint64_t(e->n_rows) != t.ne[1] || uint64_t(e->n_expert) != t.ne[2]) {
            throw std::runtime_error("its FP8 trailer has another shape for tensor '" + t.name + "' than its header" + remedy);
        }
        if (e->data_offset != t.offset) {
            throw std::runtime_error("its FP8 trailer has tensor '" + t.name + "' at another place than its header" + remedy);
        }
    }
    for (const auto & [name, entry] : entries_) {
        if (!seen.count(name)) {
            throw std::runtime_error("its FP8 trailer has scales for '" + name + "', which is no FP8 tensor of this file" + remedy);
        }
    }
}

void Trailer::parse_table() {
    Cursor c{bytes_.data(), bytes_.size()};
    const uint32_t n_tensors = c.get<uint32_t>();
    for (uint32_t i = 0; i < n_tensors; i++) {
        const uint32_t name_len = c.get<uint32_t>();
        const std::string name(reinterpret_cast<const char *>(c.take(name_len)), name_len);
        Entry e;
        e.n_expert   = int64_t(c.get<uint32_t>());
        e.n_rows     = int64_t(c.get<uint32_t>());
        e.k          = int64_t(c.get<uint32_t>());
        e.block_rows = int64_t(c.get<uint32_t>());
        e.block_k    = int64_t(c.get<uint32_t>());
        const uint32_t type = c.get<uint32_t>();
        e.data_offset = c.get<uint64_t>();
        const uint64_t at = c.get<uint64_t>();
        if (type > 2 || e.n_expert < 1 || e.n_rows < 1 || e.k < 1 || e.block_rows < 1 || e.block_k < 1) {
            throw std::runtime_error("the FP8 trailer's entry for '" + name + "' makes no sense" + remedy);
        }
        e.scale_type = ScaleType(type);
        const uint64_t grid = uint64_t((e.n_rows + e.block_rows - 1) / e.block_rows) * uint64_t((e.k + e.block_k - 1) / e.block_k);
        const uint64_t room = at >= offset_ && at - offset_ <= bytes_.size() ? bytes_.size() - (at - offset_) : 0;
        if (grid > room || uint64_t(e.n_expert) > room / (grid * scale_bytes(e.scale_type))) {
            throw std::runtime_error("the FP8 trailer's scales for '" + name + "' leave the trailer" + remedy);
        }
        e.scale_offset = size_t(at - offset_);
        entries_[name] = e;
    }
}

bool Trailer::same_as(const Reader & reader, uint64_t file_size) const {
    Footer footer;
    return read_footer(reader, file_size, footer) && footer.version == trailer_version && footer.crc == crc_ &&
           footer.offset == offset_ && footer.length == bytes_.size();
}

const Trailer::Entry * Trailer::find(const std::string & name) const {
    const auto found = entries_.find(name);
    return found == entries_.end() ? nullptr : &found->second;
}

BlockScales Trailer::scales(const Entry & e) const {
    const size_t grid = size_t((e.n_rows + e.block_rows - 1) / e.block_rows) * size_t((e.k + e.block_k - 1) / e.block_k);
    BlockScales out;
    out.type       = e.scale_type;
    out.block_rows = e.block_rows;
    out.block_k    = e.block_k;
    for (int64_t i = 0; i < e.n_expert; i++) {
        out.of_expert.push_back(bytes_.data() + e.scale_offset + size_t(i) * grid * scale_bytes(e.scale_type));
    }
    return out;
}

}  // namespace hybrid_moe
