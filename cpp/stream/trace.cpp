// The trace's file: an array of events that is valid for its readers even when the process ends in the middle.
#include "stream/trace.h"

#include "stream/json_text.h"
#include "stream/recorder.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace hybrid_moe {
namespace {

// Layers of smaller batches are not written to the file: every token of decode would be.
constexpr int64_t min_traced_tokens = 32;

std::atomic<FILE *>         file{nullptr};  // set before any thread of ours runs; null again when it is complete
std::mutex                 mutex;
std::map<std::string, int> pids;   // lanes in the viewer: one process per device, one thread per lane
std::map<std::string, int> tids;

std::string microseconds(int64_t ns) {
    const std::string digits = std::to_string(1000 + ns % 1000);
    return std::to_string(ns / 1000) + "." + digits.substr(1);
}

int number_of(std::map<std::string, int> & numbers, const std::string & key, bool & is_new) {
    const auto [i, inserted] = numbers.emplace(key, int(numbers.size()) + 1);
    is_new = inserted;
    return i->second;
}

void name_it(const char * kind, int pid, int tid, const std::string & name) {
    fprintf(file, "{\"ph\":\"M\",\"name\":\"%s\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":%s}},\n", kind, pid, tid, json_text(name).c_str());
}

void finish() {
    const std::lock_guard<std::mutex> lock(mutex);
    fprintf(file, "{\"ph\":\"i\",\"name\":\"end\",\"pid\":0,\"tid\":0,\"s\":\"g\",\"ts\":%s}]\n", microseconds(now_ns()).c_str());
    fflush(file);
    file = nullptr;  // threads of devices may still run
}

}  // namespace

int64_t now_ns() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

std::string open_trace(const char * path) {
    file = fopen(path, "we");
    if (!file) return std::string("hybrid-moe: HYBRID_MOE_TRACE=") + path + " cannot be written: " + strerror(errno);
    fprintf(file, "[\n");
    atexit(finish);
    return std::string();
}

bool traces_layer(int64_t n_tokens) {
    const int64_t from = recorded_from();
    return (from && n_tokens >= from) || (file && n_tokens >= min_traced_tokens);
}

void trace_layer(int64_t begin_ns, const char * layer, int64_t n_tokens) {
    trace_span("layers", "layer", "layer", begin_ns, now_ns(), layer, -1, n_tokens, 0);
}

void trace_span(const std::string & process, const char * lane, const char * name, int64_t begin_ns, int64_t end_ns,
                const std::string & layer, int64_t i_expert, int64_t n_rows, uint64_t n_bytes) {
    if (recorded_from()) record_span(process, lane, name, begin_ns, end_ns, layer, i_expert, n_rows, n_bytes);
    if (!file) return;
    const std::lock_guard<std::mutex> lock(mutex);
    if (!file) return;
    bool is_new;
    const int pid = number_of(pids, process, is_new);
    if (is_new) name_it("process_name", pid, 0, process);
    const int tid = number_of(tids, process + "/" + lane, is_new);
    if (is_new) name_it("thread_name", pid, tid, lane);
    fprintf(file, "{\"ph\":\"X\",\"name\":\"%s\",\"pid\":%d,\"tid\":%d,\"ts\":%s,\"dur\":%s,\"args\":{\"layer\":%s", name,
            pid, tid, microseconds(begin_ns).c_str(), microseconds(end_ns - begin_ns).c_str(), json_text(layer).c_str());
    if (i_expert >= 0) fprintf(file, ",\"expert\":%" PRId64, i_expert);
    fprintf(file, ",\"rows\":%" PRId64 ",\"bytes\":%" PRIu64 "}},\n", n_rows, n_bytes);
}

}  // namespace hybrid_moe
