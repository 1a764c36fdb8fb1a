// What devices are told of a batch, what comes next, and sums of several devices and the CPU added up by threads.
#include "expect.h"
#include "stream/layer_job.h"
#include "stream/look_ahead.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <thread>

using namespace hybrid_moe;

namespace {

std::mt19937 rng(11);

int64_t between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(rng); }

// A batch with random choices, distinct for each token.
struct Batch {
    std::vector<int32_t> ids;
    std::vector<float>   weights, y;
    MoeLayer             layer;

    Batch(int64_t n_tokens, int64_t n_expert, int64_t n_used, int64_t n_embd = 4, int64_t n_x_slots = 1) {
        std::vector<int32_t> all(static_cast<size_t>(n_expert));
        std::iota(all.begin(), all.end(), 0);
        for (int64_t t = 0; t < n_tokens; t++) {
            std::shuffle(all.begin(), all.end(), rng);
            ids.insert(ids.end(), all.begin(), all.begin() + n_used);
            for (int64_t s = 0; s < n_used; s++) weights.push_back(float(between(1, 1000)));
        }
        y.assign(size_t(n_tokens * n_embd), -1.0f);
        layer.down.weights.shape.n_expert = n_expert;
        layer.down.n_rows = n_embd;
        layer.ids = {reinterpret_cast<const uint8_t *>(ids.data()), n_used * 4, 4, n_tokens, n_used};
        layer.weights = reinterpret_cast<const uint8_t *>(weights.data());
        layer.weights_token_stride = n_used * 4;
        layer.weights_slot_stride  = 4;
        layer.n_x_slots = n_x_slots;
        layer.y = reinterpret_cast<uint8_t *>(y.data());
        layer.y_token_stride = n_embd * 4;
    }

    Routing route() const {
        Routing r;
        Pair bad;
        expect(group_by_expert(layer.ids, layer.down.weights.shape.n_expert, r, bad), "ids in range");
        return r;
    }
};

void index_vectors() {
    for (int round = 0; round < 30; round++) {
        const int64_t n_used = between(1, 6), n_slots = round % 2 ? n_used : 1;
        const Batch b(between(1, 300), between(n_used, 40), n_used, 4, n_slots);
        const Routing route = b.route();
        const DeviceIndex index = make_index(b.layer, route);
        expect(!index.has_twice, "nobody chose twice");
        expect(index.x_row.size() == index.y_row.size() && index.x_row.size() == index.weight.size(), "vectors of one length");
        int64_t n = 0;
        std::vector<char> seen(b.ids.size(), 0);
        for (int64_t e = 0; e < b.layer.down.weights.shape.n_expert; e++) {
            expect(index.begin[size_t(e)] % index_alignment == 0 && index.begin[size_t(e)] >= n, "experts begin aligned, one after another");
            expect(route.n_rows(e) <= index.max_rows, "the most rows");
            n = index.begin[size_t(e)] + route.n_rows(e);
            expect(n <= int64_t(index.x_row.size()), "within the vectors");
            for (int64_t i = index.begin[size_t(e)]; i < n; i++) {
                const int64_t token = index.y_row[size_t(i)];
                int64_t slot = 0;
                while (slot < n_used && b.ids[size_t(token * n_used + slot)] != e) slot++;
                expect(slot < n_used, "a token of that expert");
                const size_t pair = size_t(token * n_used + slot);
                expect(!seen[pair]++, "each pair once");
                expect(index.weight[size_t(i)] == b.weights[pair], "its weight");
                expect(index.x_row[size_t(i)] == token * n_slots + (n_slots == 1 ? 0 : slot), "its row of x");
            }
        }
        expect(std::all_of(seen.begin(), seen.end(), [](char c) { return c == 1; }), "all pairs");
    }
    Batch twice(50, 8, 3);
    twice.ids[31 * 3 + 2] = twice.ids[31 * 3];
    expect(make_index(twice.layer, twice.route()).has_twice, "a token that chose an expert twice");
    twice.layer.weights = nullptr;
    expect(make_index(twice.layer, twice.route()).weight[0] == 1.0f, "no weights: 1");
}

void kept_experts() {
    for (int round = 0; round < 30; round++) {
        const Batch b(between(1, 200), 20, 4);
        const Routing all = b.route();
        Routing some = all;
        std::vector<char> keep;
        for (int e = 0; e < 20; e++) keep.push_back(between(0, 1) != 0);
        keep_experts(some, keep);
        size_t n_active = 0, n_pairs = 0;
        for (int64_t e = 0; e < 20; e++) {
            const int64_t n = keep[size_t(e)] ? all.n_rows(e) : 0;
            expect(some.n_rows(e) == n, "rows of an expert, all or none");
            for (int64_t i = 0; i < n; i++) {
                const Pair was = all.pairs[size_t(all.begin[size_t(e)] + i)], is = some.pairs[size_t(some.begin[size_t(e)] + i)];
                expect(was.token == is.token && was.slot == is.slot, "the same pairs in the same order");
            }
            n_pairs += size_t(n);
            if (n) expect(some.active[n_active++] == e, "those with rows are active");
        }
        expect(some.pairs.size() == n_pairs && some.active.size() == n_active, "nothing else is left");
    }
}

LayerExperts layer_at(const uint8_t * up, const uint8_t * down, int64_t n_ff = 8) {
    LayerExperts e;
    const auto part = [&](Part p, const uint8_t * base, int64_t n_rows) {
        PartWeights & w = e.parts[size_t(p)];
        w.weights.base = base;
        w.weights.shape.n_expert = 5;
        w.weights.shape.k = 16;
        w.n_rows = n_rows;
    };
    part(Part::up, up, n_ff);
    part(Part::down, down, 16);
    return e;
}

void what_comes_next() {
    static const uint8_t bytes[16] = {};
    LookAhead ahead;
    const LayerExperts l0 = layer_at(bytes, bytes + 1), l1 = layer_at(bytes + 2, bytes + 3);
    int n_asked = 0;
    const auto nobody = [&](const PartWeights &, PartWeights &) { return n_asked++, false; };
    const auto by_place = [&](const PartWeights & p, PartWeights & next) {
        n_asked++;
        next.weights.base = p.weights.base + 2;
        return p.weights.base < bytes + 2;
    };
    const auto first = ahead.known(l0);
    expect(first == ahead.known(l0) && first != ahead.known(l1), "one object per layer");
    expect(!ahead.next(l0, nobody) && n_asked == 1, "nobody knows");
    expect(ahead.next(l0, by_place) == ahead.known(l1), "a guess");
    expect(!ahead.next(l1, by_place), "nothing behind the last");
    expect(ahead.likely(l1) == std::vector<int64_t>({0, 1, 2, 3, 4}), "all, when it never ran");
    ahead.note(nullptr, ahead.known(l0), {0, 3, 0, 9, 3});
    ahead.note(first.get(), ahead.known(l1), {1, 0, 0, 0, 0});
    ahead.note(ahead.known(l1).get(), ahead.known(l0), {0, 3, 0, 9, 3});
    n_asked = 0;
    expect(ahead.next(l0, nobody) == ahead.known(l1) && ahead.next(l1, nobody) == first && n_asked == 0, "what was seen is not guessed");
    expect(ahead.likely(l0) == std::vector<int64_t>({3, 1, 4}), "those with rows, busiest first");
    // The same places hold another layer now: nothing of the old one is known.
    const LayerExperts other = layer_at(bytes, bytes + 1, 24);
    expect(ahead.known(other) != first && ahead.likely(other).size() == 5 && !ahead.next(other, nobody), "another layer in the same place");
    ahead.forget();
    expect(!ahead.next(l1, nobody) && ahead.known(l0) != first, "forgotten");
    // Threads of two contexts.
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; i++) {
        threads.emplace_back([&, i] {
            for (int round = 0; round < 200; round++) {
                const auto a = ahead.known(l0), b = ahead.known(l1);
                ahead.note(a.get(), b, {1, 2, 3, 4, 5});
                const auto next = ahead.next(l0, [](const PartWeights &, PartWeights &) { return false; });
                if (next) expect(ahead.likely(*next).size() == 5, "five experts");
                if (i == 2 && round % 20 == 0) ahead.forget();
            }
        });
    }
    for (std::thread & t : threads) t.join();
}

void crews() {
    for (int n_threads : {1, 2, 5}) {
        Crew crew(n_threads);
        for (int64_t n : {0, 1, 2, 7, 1000}) {
            for (int round = 0; round < 50; round++) {
                std::vector<int> done(size_t(n), 0);  // each element by one thread
                crew.share(n, [&](int64_t begin, int64_t end) {
                    for (int64_t i = begin; i < end; i++) done[size_t(i)]++;
                });
                expect(std::all_of(done.begin(), done.end(), [](int d) { return d == 1; }), "every unit once");
            }
        }
    }
}

// Several devices add their parts in pieces, each in its own order; the CPU may have written before, or may never do.
void sums(bool cpu_adds) {
    constexpr int64_t n_embd = 512 << 10, n_tokens = 7;  // two rows a piece
    constexpr int n_devices = 3;
    Batch b(n_tokens, 4, 2, n_embd);
    PartialSums sums(b.layer, cpu_adds);
    expect(sums.piece_rows() == 2, "rows of a piece");
    std::vector<std::thread> devices;
    for (int d = 0; d < n_devices; d++) {
        devices.emplace_back([&, d] {
            Crew crew(2);
            std::vector<float> rows(size_t(2 * n_embd), float(1 << d));
            for (int64_t i = 0; i < 4; i++) {
                const int64_t row0 = (i + d) % 4 * 2;
                sums.add(row0, std::min<int64_t>(2, n_tokens - row0), rows.data(), crew);
            }
        });
    }
    if (cpu_adds) {
        std::fill(b.y.begin(), b.y.end(), 100.0f);
        sums.cpu_is_done();
    }
    for (std::thread & t : devices) t.join();
    const float all = 1 + 2 + 4 + (cpu_adds ? 100 : 0);
    expect(std::all_of(b.y.begin(), b.y.end(), [&](float f) { return f == all; }), "the sum of all parts");
}

// Nor does anybody write to y, which the CPU may be writing still.
void nobody_waits_for_a_cpu_that_gave_up() {
    Batch b(2, 4, 2);
    PartialSums sums(b.layer, true);
    std::thread device([&] {
        Crew crew(1);
        const std::vector<float> rows(8, 1.0f);
        sums.add(0, 2, rows.data(), crew);
    });
    sums.give_up();
    device.join();
    expect(std::all_of(b.y.begin(), b.y.end(), [](float f) { return f == -1.0f; }), "nothing is added any more");
}

}  // namespace

int main() {
    index_vectors();
    kept_experts();
    what_comes_next();
    crews();
    sums(false);
    sums(true);
    nobody_waits_for_a_cpu_that_gave_up();
    puts("ok");
}
