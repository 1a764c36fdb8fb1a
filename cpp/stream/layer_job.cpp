// LayerJob, its index vectors and the adding up of partial sums.
#include "stream/layer_job.h"

#include <cstring>

namespace hybrid_moe {
namespace {

float weight_of(const MoeLayer & layer, int64_t token, int64_t slot) {
    float w = 1.0f;
    if (layer.weights) memcpy(&w, layer.weights + token * layer.weights_token_stride + slot * layer.weights_slot_stride, sizeof w);
    return w;
}

int64_t rows_per_piece(const MoeLayer & layer) {
    const int64_t n = int64_t(result_piece_bytes / (size_t(layer.n_embd()) * sizeof(float)));
    return n < 1 ? 1 : n;
}

}  // namespace

DeviceIndex make_index(const MoeLayer & layer, const Routing & route) {
    DeviceIndex index;
    const int64_t n_expert = layer.down.weights.shape.n_expert;
    int64_t n = 0;
    index.begin.resize(size_t(n_expert));
    for (int64_t e = 0; e < n_expert; e++) {
        index.begin[size_t(e)] = n;
        index.max_rows = std::max(index.max_rows, route.n_rows(e));
        n += int64_t(align_up(size_t(route.n_rows(e)), size_t(index_alignment)));
    }
    index.x_row.resize(size_t(n));
    index.y_row.resize(size_t(n));
    index.weight.resize(size_t(n));
    for (int64_t e = 0; e < n_expert; e++) {
        for (int64_t j = 0; j < route.n_rows(e); j++) {
            const Pair p = route.pairs[size_t(route.begin[size_t(e)] + j)];
            const size_t to = size_t(index.begin[size_t(e)] + j);
            index.has_twice = index.has_twice || (j > 0 && index.y_row[to - 1] == p.token);
            index.x_row[to]  = int32_t(p.token * layer.n_x_slots + p.slot % layer.n_x_slots);
            index.y_row[to]  = p.token;
            index.weight[to] = weight_of(layer, p.token, p.slot);
        }
    }
    return index;
}

PartialSums::PartialSums(const MoeLayer & layer, bool cpu_adds)
    : layer_(&layer), piece_rows_(rows_per_piece(layer)), is_open_(!cpu_adds),
      locks_(size_t((layer.ids.n_tokens + piece_rows_ - 1) / piece_rows_)), is_written_(locks_.size(), cpu_adds) {}

void PartialSums::cpu_is_done() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_open_ = true;
    opened_.notify_all();
}

void PartialSums::give_up() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_open_ = is_given_up_ = true;
    opened_.notify_all();
}

void PartialSums::add(int64_t row0, int64_t n_rows, const float * rows, Crew & crew) {
    {
        std::unique_lock<std::mutex> lock(mutex_);
        opened_.wait(lock, [&] { return is_open_; });
        if (is_given_up_) return;
    }
    const size_t piece = size_t(row0 / piece_rows_);
    const int64_t n = layer_->n_embd();
    const std::lock_guard<std::mutex> lock(locks_[piece]);
    const bool is_first = !is_written_[piece];
    is_written_[piece] = true;
    crew.share(n_rows, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            float * to = reinterpret_cast<float *>(layer_->y + (row0 + r) * layer_->y_token_stride);
            const float * from = rows + r * n;
            if (is_first) memcpy(to, from, size_t(n) * sizeof(float));
            else for (int64_t i = 0; i < n; i++) to[i] += from[i];
        }
    });
}

void LayerJob::cancel(int i_worker, const std::string & why, bool damage) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!cancelled_.load()) {
            reason        = why;
            failed_worker = i_worker;
            is_damaged    = damage;
            cancelled_.store(true);
        }
    }
    sums.give_up();
}

}  // namespace hybrid_moe
