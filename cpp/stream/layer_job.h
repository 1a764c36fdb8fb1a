// One batch on its way through one layer on several devices: what they share while it runs.
#pragma once

#include "moe/moe_layer.h"
#include "stream/expert_graph.h"
#include "stream/expert_queue.h"
#include "stream/layer_experts.h"
#include "stream/staging.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace hybrid_moe {

// Pairs as devices want them: expert after expert, each from an aligned position.
struct DeviceIndex {
    std::vector<int64_t> begin;     // [n_expert]
    std::vector<int32_t> x_row;     // of x, [n]
    std::vector<int32_t> y_row;     // tokens, [n]
    std::vector<float>   weight;    // [n]
    int64_t              max_rows = 0;
    bool                 has_twice = false;  // a token chose an expert twice: its two rows would be added at once
};

DeviceIndex make_index(const MoeLayer & layer, const Routing & route);

// How much of a device's sum comes back at once, in whole rows. A piece is added as a whole, so all who add agree on this.
constexpr size_t result_piece_bytes = size_t(4) << 20;

// Sums of devices (and of the CPU) added up in the layer's output. Pieces of rows are locked one by one.
class PartialSums {
public:
    // cpu_adds: the CPU writes all rows first; nobody adds before cpu_is_done.
    PartialSums(const MoeLayer & layer, bool cpu_adds);

    int64_t piece_rows() const { return piece_rows_; }
    void add(int64_t row0, int64_t n_rows, const float * rows, Crew & crew);  // [n_rows][n_embd], a piece
    void cpu_is_done();
    void give_up();  // nobody waits any more, and nothing more is added: the CPU may be writing y still

private:
    const MoeLayer *              layer_;
    const int64_t                 piece_rows_;
    std::mutex                    mutex_;
    std::condition_variable       opened_;
    bool                          is_open_;
    bool                          is_given_up_ = false;
    std::vector<std::mutex>       locks_;
    std::vector<char>             is_written_;
};

struct LayerJob {
    LayerJob(const MoeLayer & l, const Routing & r, std::shared_ptr<const LayerExperts> e,
             std::vector<QueuedExpert> for_devices, std::vector<DeviceRate> rates, bool cpu_adds)
        : layer(l), route(r), experts(std::move(e)), index(make_index(l, r)),
          queue(std::move(for_devices), experts->source_bytes(), std::move(rates)), sums(l, cpu_adds) {}

    const MoeLayer &                    layer;
    const Routing &                     route;
    std::shared_ptr<const LayerExperts> experts;
    const DeviceIndex                   index;
    ExpertQueue                         queue;
    PartialSums                         sums;

    // Ends it: the layer's output is then worth nothing. The first reason is kept.
    void cancel(int i_worker, const std::string & why, bool is_damage = false);
    bool is_cancelled() const { return cancelled_.load(std::memory_order_relaxed); }

    int n_repeats = 1;  // of each expert's computation: more than one only to measure, and y is worth nothing then

    // After the end.
    int         failed_worker = -1;     // a device that failed
    bool        is_damaged    = false;  // the weights are: the CPU would fail as well
    std::string reason;

private:
    std::atomic<bool> cancelled_{false};
    std::mutex        mutex_;
};

}  // namespace hybrid_moe
