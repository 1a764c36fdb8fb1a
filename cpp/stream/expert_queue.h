// Which worker takes which expert of a layer: list scheduling by predicted finish times, busiest experts first (SmallEP).
// Decided anew at every take, so that a device that turns out slow gets less. No ggml, no threads of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace hybrid_moe {

// What an expert costs on a device: first its bytes cross the link, then its rows are computed; the two stages of different
// experts overlap.
struct DeviceRate {
    double copy_s_per_byte  = 0;
    double copy_s           = 0;  // per expert, whatever its size
    double compute_s_per_row = 0;
    double compute_s        = 0;  // per expert, whatever its rows
};

struct QueuedExpert {
    int64_t expert;
    int64_t n_rows;
};

class ExpertQueue {
public:
    // `experts`: those with rows, in any order; each is of n_bytes.
    ExpertQueue(std::vector<QueuedExpert> experts, uint64_t n_bytes, std::vector<DeviceRate> rates);

    // Gives the expert to that worker whatever the prediction says: it has the bytes already. False when it is gone, or has no rows.
    bool claim(int i_worker, int64_t expert, double now);

    // The next expert for a worker that can begin to copy now (seconds on any clock); nothing when all that is left is predicted
    // to finish earlier elsewhere, or when nothing is left (is_empty). Ask again later: predictions change.
    std::optional<int64_t> take(int i_worker, double now);

    // Takes no further part.
    void leave(int i_worker);
    // The same, if somebody else stays who takes what is left. False: nobody does.
    bool leave_to_others(int i_worker);

    bool is_empty() const;
    int64_t n_taken(int i_worker) const;
    int64_t rows_taken(int i_worker) const;

private:
    struct Worker {
        DeviceRate rate;
        double     copy_free    = 0;  // when its link will be free, predicted
        double     compute_free = 0;
        double     asked = 0;           // when it last asked
        bool       is_gone      = false;
        int64_t    n_taken = 0, rows_taken = 0;
    };
    double end_of(const Worker & w, const QueuedExpert & e, double now) const;
    static double ready_at(const Worker & w, double now);
    static void add(Worker & w, const QueuedExpert & e, uint64_t n_bytes, double now);

    mutable std::mutex        mutex_;
    std::vector<QueuedExpert> left_;     // rows descending
    const uint64_t            n_bytes_;  // of one expert
    std::vector<Worker>       workers_;
};

// How many of the idlest experts the CPU should compute so that the layer ends soonest. `rows`: descending, of all active
// experts. cpu_s(n_experts, n_rows): what the CPU takes for the n idlest. Returns a count.
struct CpuRate {
    double s_per_expert = 0;  // its weights are read once
    double s_per_row    = 0;
};
size_t share_of_cpu(const std::vector<QueuedExpert> & by_rows, uint64_t n_bytes, const std::vector<DeviceRate> & devices,
                    const CpuRate & cpu);

// When the last of the experts is done, in seconds, with all devices idle at 0.
double predict(const std::vector<QueuedExpert> & by_rows, uint64_t n_bytes, const std::vector<DeviceRate> & devices);

}  // namespace hybrid_moe
