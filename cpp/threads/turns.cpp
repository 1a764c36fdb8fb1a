// Turns: tickets under one lock.
#include "threads/turns.h"

namespace hybrid_moe {

void Turns::enter(int n_threads) {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t ticket = next_ticket_++;
    const auto may_enter = [&] {
        return ticket == serving_ && (n_active_ == 0 || n_active_ + n_threads <= room_.load(std::memory_order_relaxed));
    };
    if (!may_enter()) {
        n_waiting_.fetch_add(1, std::memory_order_relaxed);
        changed_.wait(lock, may_enter);
        n_waiting_.fetch_sub(1, std::memory_order_relaxed);
    }
    serving_++;
    n_active_ += n_threads;
    if (n_waiting_.load(std::memory_order_relaxed)) changed_.notify_all();  // the next one may fit too
}

void Turns::leave(int n_threads) {
    const std::lock_guard<std::mutex> lock(mutex_);
    n_active_ -= n_threads;
    if (n_waiting_.load(std::memory_order_relaxed)) changed_.notify_all();
}

}  // namespace hybrid_moe
