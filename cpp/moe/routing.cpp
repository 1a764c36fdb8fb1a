// group_by_expert.
#include "moe/routing.h"

namespace hybrid_moe {

bool group_by_expert(const ExpertIds & ids, int64_t n_expert, Routing & r, Pair & bad) {
    r.begin.assign(std::size_t(n_expert) + 1, 0);
    r.active.clear();
    for (int64_t t = 0; t < ids.n_tokens; t++) {
        for (int64_t s = 0; s < ids.n_used; s++) {
            const int32_t id = ids.at(t, s);
            if (id < 0 || id >= n_expert) {
                bad = {int32_t(t), int32_t(s)};
                return false;
            }
            r.begin[std::size_t(id) + 1]++;
        }
    }
    for (int64_t i = 0; i < n_expert; i++) {
        if (r.begin[std::size_t(i) + 1] > 0) r.active.push_back(i);
        r.begin[std::size_t(i) + 1] += r.begin[std::size_t(i)];
    }
    r.pairs.resize(std::size_t(ids.n_tokens * ids.n_used));
    for (int64_t t = ids.n_tokens - 1; t >= 0; t--) {  // backwards: begin[i + 1] runs down to where expert i starts
        for (int64_t s = ids.n_used - 1; s >= 0; s--) {
            r.pairs[std::size_t(--r.begin[std::size_t(ids.at(t, s)) + 1])] = {int32_t(t), int32_t(s)};
        }
    }
    for (int64_t i = 0; i < n_expert; i++) r.begin[std::size_t(i)] = r.begin[std::size_t(i) + 1];
    r.begin[std::size_t(n_expert)] = int64_t(r.pairs.size());
    return true;
}

void keep_experts(Routing & route, const std::vector<char> & keep) {
    int64_t to = 0;
    route.active.clear();
    for (size_t e = 0; e + 1 < route.begin.size(); e++) {
        const int64_t from = route.begin[e];
        const int64_t n = keep[e] ? route.begin[e + 1] - from : 0;
        for (int64_t i = 0; i < n; i++) route.pairs[size_t(to + i)] = route.pairs[size_t(from + i)];
        route.begin[e] = to;  // begin[e + 1] is still the old one
        to += n;
        if (n) route.active.push_back(int64_t(e));
    }
    route.begin.back() = to;
    route.pairs.resize(size_t(to));
}

}  // namespace hybrid_moe
