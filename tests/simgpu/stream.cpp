// Streams keep their own time: an operation is ready when it was queued or when the one before it ended, whichever is
// later by the model, not when the thread happened to wake up.
#include "stream.h"

#include "clock.h"

#include <algorithm>

namespace simgpu {

Stream::Stream() : thread_([this] { serve(); }) {}

Stream::~Stream() {
    {
        const std::lock_guard lock(mutex_);
        ending_ = true;
    }
    work_.notify_all();
    thread_.join();
}

uint64_t Stream::push(Operation operation) {
    uint64_t ticket;
    {
        const std::lock_guard lock(mutex_);
        queue_.push_back({std::move(operation), now_ns()});
        ticket = ++n_pushed_;
    }
    work_.notify_one();
    return ticket;
}

void Stream::wait(uint64_t ticket) {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return n_done_ >= ticket; });
}

void Stream::synchronize() {
    std::unique_lock lock(mutex_);
    const uint64_t ticket = n_pushed_;
    done_.wait(lock, [&] { return n_done_ >= ticket; });
}

void Stream::serve() {
    ask_for_sharp_timers();
    int64_t last_end = 0;
    for (;;) {
        Queued next;
        {
            std::unique_lock lock(mutex_);
            work_.wait(lock, [&] { return ending_ || !queue_.empty(); });
            if (queue_.empty()) return;
            next = std::move(queue_.front());
            queue_.pop_front();
        }
        last_end = next.operation(std::max(next.queued_at, last_end));
        next.operation = nullptr;  // what it holds is released before anybody is told that it is done
        sleep_until(last_end);
        {
            const std::lock_guard lock(mutex_);
            n_done_++;
        }
        done_.notify_all();
    }
}

uint64_t Event::last_record() {
    const std::lock_guard lock(mutex_);
    return n_recorded_;
}

int64_t Event::wait_for(uint64_t i_record) {
    std::unique_lock lock(mutex_);
    passed_.wait(lock, [&] { return n_passed_ >= i_record; });
    return passed_at_;
}

void Event::record(const std::shared_ptr<Event> & event, Stream & stream) {
    uint64_t i_record;
    {
        const std::lock_guard lock(event->mutex_);
        i_record = ++event->n_recorded_;
    }
    stream.push([event, i_record](int64_t ready) {
        sleep_until(ready);
        {
            const std::lock_guard lock(event->mutex_);
            event->n_passed_  = std::max(event->n_passed_, i_record);
            event->passed_at_ = ready;
        }
        event->passed_.notify_all();
        return ready;
    });
}

void Event::wait(const std::shared_ptr<Event> & event, Stream & stream) {
    const uint64_t i_record = event->last_record();
    if (i_record == 0) return;
    stream.push([event, i_record](int64_t ready) { return std::max(ready, event->wait_for(i_record)); });
}

void Event::synchronize() {
    if (const uint64_t i_record = last_record()) wait_for(i_record);
}

}  // namespace simgpu
