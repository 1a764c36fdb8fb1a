// LookAhead.
#include "stream/look_ahead.h"

#include <algorithm>
#include <numeric>

namespace hybrid_moe {

LookAhead::Key LookAhead::key_of(const LayerExperts & e) {
    const PartWeights & down = e.down();
    const void * bytes = down.weights.scattered ? static_cast<const void *>(down.weights.scattered) : down.weights.base;
    return {bytes, down.row0};
}

std::shared_ptr<const LayerExperts> LookAhead::known(const LayerExperts & experts) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Entry & e = layers_[key_of(experts)];
    if (!e.experts || !e.experts->is_same(experts) || !e.experts->has_shape_of(experts)) {
        e = Entry{};
        e.experts = std::make_shared<LayerExperts>(experts);
    }
    return e.experts;
}

void LookAhead::note(const LayerExperts * before, const std::shared_ptr<const LayerExperts> & after, const std::vector<int64_t> & rows) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (before) {
        const auto i = layers_.find(key_of(*before));
        if (i != layers_.end()) i->second.next = after;
    }
    Entry & e = layers_[key_of(*after)];
    e.experts = after;
    e.has_run = true;
    e.order.clear();
    for (size_t i = 0; i < rows.size(); i++) {
        if (rows[i] > 0) e.order.push_back(int64_t(i));
    }
    std::stable_sort(e.order.begin(), e.order.end(), [&](int64_t a, int64_t b) { return rows[size_t(a)] > rows[size_t(b)]; });
}

std::shared_ptr<const LayerExperts> LookAhead::next(const LayerExperts & experts, const Guess & guess) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto i = layers_.find(key_of(experts));
        if (i != layers_.end() && i->second.next) return i->second.next;
    }
    LayerExperts following;
    for (size_t i = 0; i < experts.parts.size(); i++) {
        const PartWeights & p = experts.parts[i];
        if (!p.exists()) continue;
        following.parts[i] = p;
        if (!guess(p, following.parts[i])) return nullptr;
    }
    return known(following);
}

std::vector<int64_t> LookAhead::likely(const LayerExperts & experts) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto i = layers_.find(key_of(experts));
    if (i != layers_.end() && i->second.has_run) return i->second.order;
    std::vector<int64_t> all(size_t(experts.n_expert()));
    std::iota(all.begin(), all.end(), 0);
    return all;
}

void LookAhead::forget() {
    const std::lock_guard<std::mutex> lock(mutex_);
    layers_.clear();
}

}  // namespace hybrid_moe
