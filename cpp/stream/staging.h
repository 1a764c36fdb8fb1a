// Pinned chunks between host memory that a device cannot copy from at full speed, and the device: bytes are written to a
// chunk by several threads while earlier chunks are on their way. One thread at a time.
#pragma once

#include "stream/gpu.h"

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace hybrid_moe {

// A few threads of our own that share one short job after another with the caller. Not the CPU pool: that one belongs to
// decode while a prefill streams.
class Crew {
public:
    explicit Crew(int n_threads);  // the caller included
    ~Crew();
    Crew(const Crew &) = delete;
    Crew & operator=(const Crew &) = delete;

    // Calls f(i, n) for i in [0, n), n <= n_threads, and returns when all have returned.
    void run(const std::function<void(int, int)> & f);
    // In pieces of whole `unit`s: f(begin, end) covers [0, n_units).
    void share(int64_t n_units, const std::function<void(int64_t, int64_t)> & f);

private:
    void work(int i_thread);

    std::mutex                             mutex_;
    std::condition_variable                begin_, end_;
    const std::function<void(int, int)> *  job_    = nullptr;
    uint64_t                               serial_ = 0;
    int                                    n_left_ = 0;
    bool                                   stop_   = false;
    std::vector<std::thread>               threads_;
};

class Staging {
public:
    Staging(const Gpu & gpu, size_t chunk_bytes, int n_chunks);

    size_t chunk_bytes() const { return chunk_bytes_; }
    bool is_pinned() const { return memory_.is_pinned(); }
    size_t size() const { return chunk_bytes_ * chunks_.size(); }

    // A chunk that no copy reads any more. After writing to it, send() queues the copy.
    uint8_t * next();
    void send(Instance & to, ggml_tensor * tensor, size_t offset, size_t n_bytes);

    // The way back. `n_bytes` of a tensor, chunk by chunk; `take(offset, n, bytes)` is called with each when it is there,
    // while the next ones are on their way. Begins at piece `first_piece` (of piece_bytes, at most chunk_bytes), goes around.
    void fetch(Instance & from, const ggml_tensor * tensor, size_t n_bytes, size_t piece_bytes, size_t first_piece,
               const std::function<void(size_t offset, size_t n, const uint8_t * bytes)> & take);

private:
    struct Chunk {
        uint8_t * data = nullptr;
        Fence     fence;
    };
    const size_t       chunk_bytes_;
    HostMemory         memory_;
    std::vector<Chunk> chunks_;
    size_t             i_ = 0;
};

}  // namespace hybrid_moe
