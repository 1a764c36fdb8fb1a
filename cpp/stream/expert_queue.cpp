// ExpertQueue and the split between devices and the CPU.
#include "stream/expert_queue.h"

#include <algorithm>
#include <cstdio>

namespace hybrid_moe {
namespace {

// Where a worker's two stages stand after one more expert.
struct Stage {
    double copy_free, compute_free;
};

Stage after(const DeviceRate & rate, double copy_free, double compute_free, int64_t n_rows, uint64_t n_bytes, double now) {
    Stage s;
    s.copy_free    = std::max(copy_free, now) + rate.copy_s + double(n_bytes) * rate.copy_s_per_byte;
    s.compute_free = std::max(s.copy_free, compute_free) + rate.compute_s + double(n_rows) * rate.compute_s_per_row;
    return s;
}

}  // namespace

ExpertQueue::ExpertQueue(std::vector<QueuedExpert> experts, uint64_t n_bytes, std::vector<DeviceRate> rates)
    : left_(std::move(experts)), n_bytes_(n_bytes) {
    std::stable_sort(left_.begin(), left_.end(), [](const QueuedExpert & a, const QueuedExpert & b) { return a.n_rows > b.n_rows; });
    for (const DeviceRate & rate : rates) {
        Worker w;
        w.rate = rate;
        workers_.push_back(w);
    }
}

void ExpertQueue::add(Worker & w, const QueuedExpert & e, uint64_t n_bytes, double now) {
    const Stage s = after(w.rate, w.copy_free, w.compute_free, e.n_rows, n_bytes, now);
    w.copy_free    = s.copy_free;
    w.compute_free = s.compute_free;
    w.n_taken++;
    w.rows_taken += e.n_rows;
}

// A worker asks when it can begin to copy. One that is late for that is held up by something that no rate tells: it will need
// about as long again.
double ExpertQueue::ready_at(const Worker & w, double now) {
    const double due = std::max(w.copy_free, w.asked);
    return w.asked > 0 && due < now ? now + (now - due) : std::max(w.copy_free, now);
}

double ExpertQueue::end_of(const Worker & w, const QueuedExpert & e, double now) const {
    return after(w.rate, w.copy_free, w.compute_free, e.n_rows, n_bytes_, now).compute_free;
}

bool ExpertQueue::claim(int i_worker, int64_t expert, double now) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find_if(left_.begin(), left_.end(), [expert](const QueuedExpert & e) { return e.expert == expert; });
    if (found == left_.end()) return false;
    Worker & w = workers_[size_t(i_worker)];
    w.compute_free = std::max(w.compute_free, now) + w.rate.compute_s + double(found->n_rows) * w.rate.compute_s_per_row;
    w.n_taken++;
    w.rows_taken += found->n_rows;
    left_.erase(found);
    return true;
}

std::optional<int64_t> ExpertQueue::take(int i_worker, double now) {
    const std::lock_guard<std::mutex> lock(mutex_);
    workers_[size_t(i_worker)].asked = now;
    std::vector<Worker> plan = workers_;
    for (Worker & w : plan) w.copy_free = ready_at(w, now);
    for (size_t i = 0; i < left_.size(); i++) {
        // Equal ends: whoever asks is served.
        size_t best = size_t(i_worker);
        double best_end = end_of(plan[best], left_[i], now);
        for (size_t w = 0; w < plan.size(); w++) {
            if (plan[w].is_gone || w == size_t(i_worker)) continue;
            const double end = end_of(plan[w], left_[i], now);
            if (end < best_end) {
                best = w;
                best_end = end;
            }
        }
        if (best == size_t(i_worker)) {
            const QueuedExpert e = left_[i];
            add(workers_[best], e, n_bytes_, now);
            left_.erase(left_.begin() + std::ptrdiff_t(i));
            return e.expert;
        }
        add(plan[best], left_[i], n_bytes_, now);
    }
    return std::nullopt;
}

void ExpertQueue::leave(int i_worker) {
    const std::lock_guard<std::mutex> lock(mutex_);
    workers_[size_t(i_worker)].is_gone = true;
}

bool ExpertQueue::leave_to_others(int i_worker) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t w = 0; w < workers_.size(); w++) {
        if (w == size_t(i_worker) || workers_[w].is_gone) continue;
        workers_[size_t(i_worker)].is_gone = true;
        return true;
    }
    return false;
}

bool ExpertQueue::is_empty() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return left_.empty();
}

int64_t ExpertQueue::n_taken(int i_worker) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return workers_[size_t(i_worker)].n_taken;
}

int64_t ExpertQueue::rows_taken(int i_worker) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return workers_[size_t(i_worker)].rows_taken;
}

double predict(const std::vector<QueuedExpert> & by_rows, uint64_t n_bytes, const std::vector<DeviceRate> & devices) {
    std::vector<Stage> stages(devices.size(), Stage{0, 0});
    double end = 0;
    for (const QueuedExpert & e : by_rows) {
        size_t best = 0;
        Stage best_stage = {};
        for (size_t d = 0; d < devices.size(); d++) {
            const Stage s = after(devices[d], stages[d].copy_free, stages[d].compute_free, e.n_rows, n_bytes, 0);
            if (d == 0 || s.compute_free < best_stage.compute_free) {
                best = d;
                best_stage = s;
            }
        }
        if (!devices.empty()) stages[best] = best_stage;
        end = std::max(end, best_stage.compute_free);
    }
    return end;
}

// The devices' time falls and the CPU's grows with the CPU's share: halve to where they meet.
size_t share_of_cpu(const std::vector<QueuedExpert> & by_rows, uint64_t n_bytes, const std::vector<DeviceRate> & devices,
                    const CpuRate & cpu) {
    std::vector<int64_t> rows_of_idlest(by_rows.size() + 1, 0);
    for (size_t i = 0; i < by_rows.size(); i++) {
        rows_of_idlest[i + 1] = rows_of_idlest[i] + by_rows[by_rows.size() - 1 - i].n_rows;
    }
    size_t low = 0;
    size_t high = by_rows.size();
    while (low < high) {
        const size_t n = (low + high + 1) / 2;
        const double cpu_s = double(n) * cpu.s_per_expert + double(rows_of_idlest[n]) * cpu.s_per_row;
        const std::vector<QueuedExpert> rest(by_rows.begin(), by_rows.end() - std::ptrdiff_t(n));
        if (cpu_s <= predict(rest, n_bytes, devices)) low = n;
        else high = n - 1;
    }
    // The CPU may still end sooner with one more, although it then ends last.
    if (low < by_rows.size()) {
        const auto end_with = [&](size_t n) {
            const std::vector<QueuedExpert> rest(by_rows.begin(), by_rows.end() - std::ptrdiff_t(n));
            return std::max(double(n) * cpu.s_per_expert + double(rows_of_idlest[n]) * cpu.s_per_row, predict(rest, n_bytes, devices));
        };
        if (end_with(low + 1) < end_with(low)) low++;
    }
    return low;
}

}  // namespace hybrid_moe
