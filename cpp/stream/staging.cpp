// Crew and Staging.
#include "stream/staging.h"

#include <algorithm>

namespace hybrid_moe {

Crew::Crew(int n_threads) {
    for (int i = 1; i < n_threads; i++) threads_.emplace_back([this, i] { work(i); });
}

Crew::~Crew() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    begin_.notify_all();
    for (std::thread & t : threads_) t.join();
}

void Crew::work(int i_thread) {
    uint64_t done = 0;
    for (;;) {
        const std::function<void(int, int)> * job;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            begin_.wait(lock, [&] { return stop_ || serial_ != done; });
            if (stop_) return;
            done = serial_;
            job  = job_;
        }
        (*job)(i_thread, int(threads_.size()) + 1);
        const std::lock_guard<std::mutex> lock(mutex_);
        if (--n_left_ == 0) end_.notify_one();
    }
}

void Crew::run(const std::function<void(int, int)> & f) {
    if (threads_.empty()) return f(0, 1);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        job_    = &f;
        n_left_ = int(threads_.size());
        serial_++;
    }
    begin_.notify_all();
    f(0, int(threads_.size()) + 1);
    std::unique_lock<std::mutex> lock(mutex_);
    end_.wait(lock, [&] { return n_left_ == 0; });
}

void Crew::share(int64_t n_units, const std::function<void(int64_t, int64_t)> & f) {
    run([&](int i, int n) {
        const int64_t begin = n_units * i / n;
        const int64_t end   = n_units * (i + 1) / n;
        if (begin < end) f(begin, end);
    });
}

Staging::Staging(const Gpu & gpu, size_t chunk_bytes, int n_chunks)
    : chunk_bytes_(align_up(chunk_bytes, 4096)), memory_(gpu, chunk_bytes_ * size_t(n_chunks)), chunks_(size_t(n_chunks)) {
    for (size_t i = 0; i < chunks_.size(); i++) chunks_[i].data = memory_.data() + i * chunk_bytes_;
}

uint8_t * Staging::next() {
    i_ = (i_ + 1) % chunks_.size();
    chunks_[i_].fence.wait();
    return chunks_[i_].data;
}

void Staging::send(Instance & to, ggml_tensor * tensor, size_t offset, size_t n_bytes) {
    to.set(tensor, chunks_[i_].data, offset, n_bytes);
    chunks_[i_].fence.set(to);
}

void Staging::fetch(Instance & from, const ggml_tensor * tensor, size_t n_bytes, size_t piece_bytes, size_t first_piece,
                    const std::function<void(size_t offset, size_t n, const uint8_t * bytes)> & take) {
    const size_t n_pieces = (n_bytes + piece_bytes - 1) / piece_bytes;
    const size_t ahead    = chunks_.size() - 1;
    const auto offset_of  = [&](size_t i) { return (i + first_piece) % n_pieces * piece_bytes; };
    const auto length_of  = [&](size_t i) { return std::min(piece_bytes, n_bytes - offset_of(i)); };
    for (size_t i = 0; i < n_pieces + ahead; i++) {
        if (i < n_pieces) {
            Chunk & c = chunks_[i % chunks_.size()];
            from.get(tensor, c.data, offset_of(i), length_of(i));
            c.fence.set(from);
        }
        if (i < ahead) continue;
        const size_t j = i - ahead;
        Chunk & c = chunks_[j % chunks_.size()];
        c.fence.wait();
        take(offset_of(j), length_of(j), c.data);
    }
}

}  // namespace hybrid_moe
