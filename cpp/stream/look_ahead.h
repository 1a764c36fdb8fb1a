// Which layer comes after which, and what of it is likely to be wanted: learnt from what ran, and before anything ran from
// where a model's layers are (a guess costs bandwidth when it is wrong, never a result).
#pragma once

#include "stream/layer_experts.h"

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace hybrid_moe {

class LookAhead {
public:
    // One object per layer of a model, so that "the same layer" is "the same pointer".
    std::shared_ptr<const LayerExperts> known(const LayerExperts & experts);

    // `after` ran behind `before` (null: it is the first that is known of a context), with these rows per expert.
    void note(const LayerExperts * before, const std::shared_ptr<const LayerExperts> & after, const std::vector<int64_t> & rows);

    // What runs after this layer; null when nobody knows. `guess` is asked before the first pass has shown it.
    using Guess = std::function<bool(const PartWeights & part, PartWeights & next)>;
    std::shared_ptr<const LayerExperts> next(const LayerExperts & experts, const Guess & guess);

    // Experts of a layer that were wanted when it last ran, busiest first; all of them when it never did.
    std::vector<int64_t> likely(const LayerExperts & experts);

    void forget();

private:
    using Key = std::pair<const void *, int64_t>;  // the down projection's bytes
    static Key key_of(const LayerExperts & e);
    struct Entry {
        std::shared_ptr<const LayerExperts> experts, next;
        std::vector<int64_t>                order;
        bool                                has_run = false;
    };
    std::mutex           mutex_;
    std::map<Key, Entry> layers_;
};

}  // namespace hybrid_moe
