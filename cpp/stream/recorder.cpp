// Two rings, so that thousands of experts do not push the layers out that they belong to.
#include "stream/recorder.h"

#include "stream/json_text.h"

#include <unistd.h>

#include <sys/syscall.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace hybrid_moe {
namespace {

struct Span {
    int64_t  begin_ns, end_ns;
    int32_t  process, lane, name, layer;  // numbers of texts
    int32_t  i_expert, thread;
    int64_t  n_rows;
    uint64_t n_bytes;
};

// A pass of a model with 60 layers of 256 experts makes 31,000 spans of devices: two of them fit, 4 MiB.
constexpr size_t max_layers = 4096;
constexpr size_t max_others = 65536;

struct Ring {
    size_t            capacity;
    std::vector<Span> spans;
    size_t            next = 0;  // the oldest, once it is full

    void add(const Span & span) {
        if (spans.size() < capacity) {
            spans.push_back(span);
        } else {
            spans[next] = span;
            next = (next + 1) % capacity;
        }
    }
};

std::atomic<int64_t>           from{0};
std::mutex                     mutex;
Ring                           layers{max_layers, {}};
Ring                           others{max_others, {}};
std::map<std::string, int32_t> numbers;
std::vector<std::string>       texts;

int32_t number_of(const std::string & text) {
    const auto [i, is_new] = numbers.emplace(text, int32_t(texts.size()));
    if (is_new) texts.push_back(text);
    return i->second;
}

void add_text(std::string & out, const char * key, int32_t number) {
    out.append("\"").append(key).append("\":").append(json_text(texts[size_t(number)])).append(",");
}

void add_count(std::string & out, const char * key, int64_t n, const char * end = ",") {
    out.append("\"").append(key).append("\":").append(std::to_string(n)).append(end);
}

void add_span(std::string & out, const Span & s) {
    out.append("{");
    add_text(out, "process", s.process);
    add_text(out, "lane", s.lane);
    add_text(out, "name", s.name);
    add_text(out, "layer", s.layer);
    add_count(out, "begin_ns", s.begin_ns);
    add_count(out, "end_ns", s.end_ns);
    add_count(out, "expert", s.i_expert);
    add_count(out, "rows", s.n_rows);
    add_count(out, "bytes", int64_t(s.n_bytes));
    add_count(out, "thread", s.thread, "}");
}

}  // namespace

void record_from(int64_t min_tokens) {
    const std::lock_guard<std::mutex> lock(mutex);
    from = min_tokens;
    if (min_tokens > 0) return;
    layers = Ring{max_layers, {}};
    others = Ring{max_others, {}};
}

int64_t recorded_from() { return from.load(std::memory_order_relaxed); }

void record_span(const std::string & process, const char * lane, const char * name, int64_t begin_ns, int64_t end_ns,
                 const std::string & layer, int64_t i_expert, int64_t n_rows, uint64_t n_bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!from) return;
    const Span span{begin_ns, end_ns, number_of(process), number_of(lane), number_of(name), number_of(layer),
                    int32_t(i_expert), int32_t(syscall(SYS_gettid)), n_rows, n_bytes};
    (strcmp(lane, "layer") ? others : layers).add(span);
}

std::string recorded(bool of_layers, int64_t begin_ns, int64_t end_ns) {
    std::string out = "[";
    const std::lock_guard<std::mutex> lock(mutex);
    const Ring & ring = of_layers ? layers : others;
    for (size_t i = 0; i < ring.spans.size(); i++) {
        const Span & s = ring.spans[(ring.next + i) % ring.spans.size()];
        if (s.end_ns < begin_ns || s.begin_ns > end_ns) continue;
        if (out.size() > 1) out.append(",");
        add_span(out, s);
    }
    out.append("]");
    return out;
}

}  // namespace hybrid_moe
