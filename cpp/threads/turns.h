// Who may compute now, when several contexts of a process want the same CPUs. Starts no threads.
//
// Regions that fit beside each other on physical cores run beside each other (a host that gave each of two contexts half of
// the cores has divided them on purpose); others wait for their turn, first come, first served. Sharing the threads of one region
// instead would not shorten anything: expert layers are bound by memory bandwidth or by multiply-adds, both of which one
// region uses up, and more threads than CPUs wait for each other's time slices. What a queue could do wrong is let a
// token wait behind a long prompt, so long regions offer their place between tiles (Turn::is_over).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace hybrid_moe {

class Turns {
public:
    // `capacity`: threads that a region may have. `room`: those of several regions that may run at once, at most as many.
    Turns(int capacity, int room) : capacity_(capacity), room_(room < capacity ? room : capacity) {}

    // Waits until n_threads more threads have room, or until nobody else computes. Returns behind all who came before.
    void enter(int n_threads);
    void leave(int n_threads);

    bool somebody_waits() const { return n_waiting_.load(std::memory_order_relaxed) > 0; }
    int capacity() const { return capacity_.load(std::memory_order_relaxed); }
    void set_capacity(int n) {  // and the room, for tests
        capacity_.store(n, std::memory_order_relaxed);
        room_.store(n, std::memory_order_relaxed);
    }

private:
    std::mutex              mutex_;
    std::condition_variable changed_;
    uint64_t                next_ticket_ = 0;
    uint64_t                serving_     = 0;
    int                     n_active_    = 0;  // threads of the regions that run
    std::atomic<int>        n_waiting_{0};
    std::atomic<int>        capacity_;
    std::atomic<int>        room_;
};

// Passes through the door and back.
class Visit {
public:
    Visit(Turns & turns, int n_threads) : turns_(turns), n_(n_threads) { turns_.enter(n_); }
    ~Visit() { turns_.leave(n_); }
    Visit(const Visit &) = delete;
    Visit & operator=(const Visit &) = delete;

private:
    Turns & turns_;
    int     n_;
};

}  // namespace hybrid_moe
