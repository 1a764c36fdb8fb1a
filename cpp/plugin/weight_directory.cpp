// The directory: addresses and names of loaded expert tensors.
#include "plugin/weight_directory.h"

#include "plugin/describe.h"

#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

namespace hybrid_moe {
namespace {

using Name = std::pair<ggml_backend_buffer_t, std::string>;

struct Directory {
    std::mutex                            mutex;
    std::map<Name, const ggml_tensor *>   by_name;
    std::map<const void *, Name>          by_bytes;  // of the experts' first byte, or what is behind the tensor
};

Directory & directory() {
    static Directory * d = new Directory;
    return *d;
}

const void * key_of(const ExpertWeights & w) { return w.scattered ? static_cast<const void *>(w.scattered) : w.base; }

// "blk.7.x" -> "blk.8.x"; empty when it has no number.
std::string with_next_number(const std::string & name) {
    const size_t begin = name.find_first_of("0123456789");
    if (begin == std::string::npos) return std::string();
    const size_t end = name.find_first_not_of("0123456789", begin);
    return name.substr(0, begin) + std::to_string(strtol(name.c_str() + begin, nullptr, 10) + 1) + (end == std::string::npos ? "" : name.substr(end));
}

}  // namespace

void note_weight(const ggml_tensor * tensor) {
    Directory & d = directory();
    const std::lock_guard<std::mutex> lock(d.mutex);
    const Name name = {tensor->buffer, tensor->name};
    d.by_name[name] = tensor;
    d.by_bytes[key_of(weights_of(tensor))] = name;
}

void forget_weights(ggml_backend_buffer_t buffer) {
    Directory & d = directory();
    const std::lock_guard<std::mutex> lock(d.mutex);
    std::erase_if(d.by_name, [buffer](const auto & e) { return e.first.first == buffer; });
    std::erase_if(d.by_bytes, [buffer](const auto & e) { return e.second.first == buffer; });
}

bool weight_of_next_layer(const PartWeights & part, PartWeights & next) {
    Directory & d = directory();
    const std::lock_guard<std::mutex> lock(d.mutex);
    const auto here = d.by_bytes.find(key_of(part.weights));
    if (here == d.by_bytes.end()) return false;
    const auto there = d.by_name.find({here->second.first, with_next_number(here->second.second)});
    if (there == d.by_name.end()) return false;
    next.weights = weights_of(there->second);
    next.weights.name = "";
    next.name = there->second->name;
    const auto & a = part.weights.shape;
    const auto & b = next.weights.shape;
    return a.type == b.type && a.n_expert == b.n_expert && a.n_rows == b.n_rows && a.k == b.k;
}

}  // namespace hybrid_moe
