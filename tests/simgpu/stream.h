// The in-order queue of one backend instance, served by a thread of its own, and the events that order several of them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace simgpu {

// Begins when `ready` [ns] has come; returns when its charge ends, until which the stream is busy with it.
using Operation = std::function<int64_t(int64_t ready)>;

class Stream {
public:
    Stream();
    ~Stream();  // finishes what is queued

    uint64_t push(Operation operation);  // returns a ticket
    void     wait(uint64_t ticket);
    void     synchronize();

private:
    struct Queued {
        Operation operation;
        int64_t   queued_at;  // [ns]
    };
    void serve();

    std::mutex mutex_;
    std::condition_variable work_;
    std::condition_variable done_;
    std::deque<Queued> queue_;
    uint64_t n_pushed_ = 0;
    uint64_t n_done_   = 0;
    bool     ending_   = false;
    std::thread thread_;
};

// As with real devices, a wait means the latest record before the wait was called, and none if there was none.
class Event {
public:
    static void record(const std::shared_ptr<Event> & event, Stream & stream);
    static void wait(const std::shared_ptr<Event> & event, Stream & stream);
    void synchronize();

private:
    int64_t  wait_for(uint64_t i_record);  // returns when it was passed [ns]
    uint64_t last_record();

    std::mutex mutex_;
    std::condition_variable passed_;
    uint64_t n_recorded_ = 0;
    uint64_t n_passed_   = 0;
    int64_t  passed_at_  = 0;
};

}  // namespace simgpu
