// Rows on NUMA nodes: how they are divided, who takes which tile, where the pages are, and that a layer computes the same
// from copies. Runs on any machine; with several nodes the pages must be where they were asked for. As the first process of
// a virtual machine (tests/numa_guest) it mounts what it needs, reports, and switches the machine off.
#include "moe/expert_copy.h"
#include "moe/lanes.h"
#include "moe/moe_layer.h"
#include "threads/team.h"
#include "threads/topology.h"

#include <linux/reboot.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

using namespace hybrid_moe;

namespace {

void stop(int status) {
    fflush(stdout);
    if (getpid() == 1) reboot(LINUX_REBOOT_CMD_POWER_OFF);
    _exit(status);
}

void expect(bool holds, const std::string & what) {
    if (holds) return;
    printf("not so: %s\n", what.c_str());
    stop(1);
}

// Plain loops instead of the kernels: this is about where bytes are.
float value(const ExpertMatrix & e, int64_t row, int64_t i) {
    float f;
    memcpy(&f, e.row(row) + 4 * i, sizeof f);
    return f;
}

void plain_dot(const ExpertMatrix & e, int64_t row0, int64_t row1, const TokenRows & t) {
    for (int64_t j = 0; j < t.m; j++) {
        for (int64_t r = row0; r < row1; r++) {
            float sum = 0;
            for (int64_t i = 0; i < e.k; i++) sum += value(e, r, i) * t.x[j][i];
            t.y[j][r] = sum;
        }
    }
}

void plain_gemm(const ExpertMatrix & e, int64_t row0, int64_t row1, const TokenRows & t, float *) { plain_dot(e, row0, row1, t); }

void plain_activate(const Activation &, const float * gate, const float * up, int64_t n, float * out) {
    for (int64_t i = 0; i < n; i++) out[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
}

void plain_accumulate(float a, const float * x, int64_t n, float * y) {
    for (int64_t i = 0; i < n; i++) y[i] += a * x[i];
}

const Kernels plain = {"plain", plain_dot, plain_gemm, nullptr, plain_activate, plain_accumulate, nullptr, nullptr};

std::vector<float> random_floats(size_t n, unsigned seed) {
    std::vector<float> out(n);
    for (float & f : out) {
        seed = seed * 1664525u + 1013904223u;
        f = float(int(seed >> 8) % 2001 - 1000) / 1000.0f;
    }
    return out;
}

bool is_division(const std::vector<RowPart> & parts, int64_t n_rows) {
    int64_t row = 0;
    for (const RowPart & p : parts) {
        if (p.row0 != row || p.row1 <= p.row0) return false;
        row = p.row1;
    }
    return row == n_rows;
}

int node_of_row(const std::vector<RowPart> & parts, int64_t row) {
    for (const RowPart & p : parts) {
        if (row < p.row1) return p.node;
    }
    return -1;
}

void rows_are_divided() {
    for (const std::vector<int> & weights : std::vector<std::vector<int>>{{1}, {1, 1}, {3, 1}, {1, 1, 1, 1}, {64, 1}}) {
        for (int64_t n_rows : {1, 31, 32, 64, 192, 768, 2048, 7168, 2880}) {
            const std::vector<RowPart> parts = divide_rows(n_rows, weights);
            expect(is_division(parts, n_rows), "parts cover all rows once");
            expect(weights.size() > 1 || parts.size() == 1, "one node has all rows in one piece");
        }
    }
    const std::vector<RowPart> even = divide_rows(4096, {1, 1}), uneven = divide_rows(4096, {3, 1});
    int64_t first = 0, first_of_uneven = 0;
    for (int64_t r = 0; r < 4096; r++) {
        first += node_of_row(even, r) == 0;
        first_of_uneven += node_of_row(uneven, r) == 0;
        expect(r >= 2048 || node_of_row(even, r) == node_of_row(even, r + 2048), "gate and up rows are on one node");
    }
    expect(first == 2048 && first_of_uneven == 3072, "rows go by the weight of the nodes");
}

void lanes_give_every_tile_once(const std::vector<RowPart> & parts, int64_t row0, int64_t n_rows) {
    Lanes lanes;
    for (int64_t rows_per_tile : {16, 48, 100000}) {
        lanes.cut(parts, row0, n_rows, rows_per_tile, 5);
        std::vector<std::atomic<int>> seen(size_t(5 * n_rows));
        std::vector<std::thread> threads;
        for (int t = 0; t < 3; t++) {
            threads.emplace_back([&, t] {
                int64_t i;
                for (RowTile tile; lanes.take(t, i, tile);) {
                    expect(tile.row1 - tile.row0 <= rows_per_tile, "tiles are no larger than asked");
                    for (int64_t r = tile.row0; r < tile.row1; r++) seen[size_t(i * n_rows + r)].fetch_add(1);
                    const bool in_one = parts.empty() || node_of_row(parts, row0 + tile.row0) == node_of_row(parts, row0 + tile.row1 - 1);
                    expect(in_one, "a tile is of one node");
                }
            });
        }
        for (std::thread & t : threads) t.join();
        for (const auto & n : seen) expect(n.load() == 1, "every row of every repeat once");
        expect(lanes.is_empty(), "nothing is left");
    }
}

void own_lane_comes_first() {
    const std::vector<RowPart> parts = divide_rows(256, {1, 1});
    Lanes lanes;
    lanes.cut(parts, 0, 256, 32, 3);
    expect(lanes.has_nodes() && lanes.n_tiles() == 8, "two lanes");
    for (int n = 0; n < 24; n++) {
        int64_t i;
        RowTile tile;
        expect(lanes.take(1, i, tile), "there is a tile");
        expect(node_of_row(parts, tile.row0) == (n < 12 ? 1 : 0), "first those of node 1, then the others");
    }
}

void lanes_work() {
    lanes_give_every_tile_once({}, 0, 200);
    lanes_give_every_tile_once(divide_rows(768, {1, 1}), 0, 768);
    lanes_give_every_tile_once(divide_rows(768, {2, 1, 1}), 0, 768);
    lanes_give_every_tile_once(divide_rows(1536, {1, 1}), 768, 768);  // the lower half of a merged matrix
    lanes_give_every_tile_once(divide_rows(200, std::vector<int>(20, 1)), 0, 200);  // more nodes than lanes
    own_lane_comes_first();
}

// Which bytes of a file a tensor stands for; `number` tells tensors apart.
std::vector<FilePiece> pieces(uint64_t number) { return {{1, 2, 3, number, 4}}; }

uint64_t bytes_on(const std::vector<RowPart> & parts, int node, size_t row_bytes) {
    uint64_t n = 0;
    for (const RowPart & p : parts) n += p.node == node ? uint64_t(p.row1 - p.row0) * row_bytes : 0;
    return n;
}

void copies_are_shared_and_right() {
    constexpr int64_t n_expert = 3, n_rows = 320, k = 40;
    const std::vector<float> w = random_floats(n_expert * n_rows * k, 1);
    const auto bytes_of = [&](int64_t i) { return reinterpret_cast<const uint8_t *>(w.data()) + size_t(i) * n_rows * k * 4; };
    auto a = shared_copy("a", pieces(1), n_expert, n_rows, k * 4);
    auto b = shared_copy("b", pieces(1), n_expert, n_rows, k * 4);
    auto c = shared_copy("c", pieces(2), n_expert, n_rows, k * 4);
    expect(a && a == b && c && c != a, "the same pieces are one copy, others are another");
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; t++) {
        threads.emplace_back([&] {
            for (int64_t i = 0; i < n_expert; i++) a->fetch(i, bytes_of(i));
        });
    }
    for (std::thread & t : threads) t.join();
    expect(a->n_copied() == a->n_bytes() && c->n_copied() == 0, "each expert was copied once");
    for (int64_t i = 0; i < n_expert; i++) {
        for (int64_t r = 0, end; r < n_rows; r = end) {
            const uint8_t * at = a->rows_at(i, r, end);
            expect(end > r && !memcmp(at + r * k * 4, bytes_of(i) + r * k * 4, size_t(end - r) * k * 4), "rows are what they were");
        }
    }
    const ExpertCopy * before = a.get();
    a.reset();
    expect(shared_copy("b", pieces(1), n_expert, n_rows, k * 4).get() == before, "it lives while somebody uses it");
    b.reset();
    c.reset();
    a = shared_copy("a", pieces(1), n_expert, n_rows, k * 4);
    expect(a->n_copied() == 0, "after the last user it is gone");
}

// Pages of a copy of some MiB: all of them present, and on each node what was wanted there.
void pages_are_where_they_should_be() {
    constexpr int64_t n_expert = 4, n_rows = 2048;
    constexpr size_t row_bytes = 4096;
    const std::vector<uint8_t> expert(size_t(n_rows) * row_bytes, 7);
    ExpertCopy copy(n_expert, n_rows, row_bytes, divide_rows(n_rows));
    for (int64_t i = 0; i < n_expert; i++) copy.fetch(i, expert.data());
    const std::string told = describe_copies(false);
    printf("%s\n", told.c_str());
    const std::vector<Node> & nodes = machine().nodes;
    for (size_t i = 0; i < nodes.size(); i++) {
        const uint64_t wanted = nodes[i].may_hold ? n_expert * bytes_on(copy.parts(), int(i), row_bytes) : 0;
        const std::string line = "{\"id\": " + std::to_string(nodes[i].id) + ", \"wanted\": " + std::to_string(wanted) +
                                 ", \"there\": " + std::to_string(wanted) + "}";
        expect(told.find(line) != std::string::npos || told.find("null") != std::string::npos, "pages are on their nodes: " + line);
    }
    expect(told.find("\"elsewhere\": 0") != std::string::npos, "no page is elsewhere");
}

std::unique_ptr<ExpertTensor> tensor(const char * name, const std::vector<float> & w, int64_t n_expert, int64_t n_rows, int64_t k,
                                     uint64_t number, bool copied) {
    std::vector<const uint8_t *> of_expert;
    for (int64_t i = 0; i < n_expert; i++) of_expert.push_back(reinterpret_cast<const uint8_t *>(w.data() + i * n_rows * k));
    const ExpertTensor::Shape shape = {WeightType::f32, n_expert, n_rows, k, size_t(k) * 4};
    auto t = std::make_unique<ExpertTensor>(name, shape, of_expert, BlockScales{}, nullptr);
    t->set_origin(pieces(number));
    expect(!copied || t->copy_to_memory(), "there is memory for a copy");
    return t;
}

ExpertWeights weights(ExpertTensor & t) {
    ExpertWeights w;
    w.name      = t.name().c_str();
    w.shape     = t.shape();
    w.scattered = &t;
    return w;
}

std::vector<float> run_layer(bool merged, bool copied, int64_t n_tokens, int n_threads) {
    constexpr int64_t n_expert = 5, n_ff = 192, n_embd = 256, n_used = 2;
    const std::vector<float> w_up = random_floats(n_expert * n_ff * n_embd * 2, 3), w_down = random_floats(n_expert * n_embd * n_ff, 4);
    const std::vector<float> w_gate = random_floats(n_expert * n_ff * n_embd, 5);
    const auto up = tensor("up", w_up, n_expert, merged ? 2 * n_ff : n_ff, n_embd, merged ? 10 : 11, copied);
    const auto gate = tensor("gate", w_gate, n_expert, n_ff, n_embd, 12, copied);
    const auto down = tensor("down", w_down, n_expert, n_embd, n_ff, 13, copied);
    const std::vector<float> x = random_floats(size_t(n_tokens * n_embd), 6), weight = random_floats(size_t(n_tokens * n_used), 7);
    std::vector<int32_t> ids;
    for (int64_t t = 0; t < n_tokens; t++) {
        ids.push_back(int32_t(t % n_expert));
        ids.push_back(int32_t((t + 2) % n_expert));
    }
    std::vector<float> y(size_t(n_tokens * n_embd));
    MoeLayer layer;
    layer.gate = {weights(merged ? *up : *gate), 0, n_ff, {}};
    layer.up   = {weights(*up), merged ? n_ff : 0, n_ff, {}};
    layer.down = {weights(*down), 0, n_embd, {}};
    layer.ids  = {reinterpret_cast<const uint8_t *>(ids.data()), n_used * 4, 4, n_tokens, n_used};
    layer.weights              = reinterpret_cast<const uint8_t *>(weight.data());
    layer.weights_token_stride = n_used * 4;
    layer.weights_slot_stride  = 4;
    layer.x              = reinterpret_cast<const uint8_t *>(x.data());
    layer.x_token_stride = n_embd * 4;
    layer.x_slot_stride  = n_embd * 4;
    layer.y              = reinterpret_cast<uint8_t *>(y.data());
    layer.y_token_stride = n_embd * 4;
    Workspace work;
    char error[512] = "";
    expect(run_moe_layer(layer, {&plain, n_threads, nullptr, nullptr}, work, error) == RunStatus::ok, error);
    return y;
}

void layers_are_the_same_from_copies() {
    for (bool merged : {false, true}) {
        for (int64_t n_tokens : {1, 7, 40}) {
            const std::vector<float> expected = run_layer(merged, false, n_tokens, 1);
            for (int n_threads : {1, 2, 4}) expect(run_layer(merged, true, n_tokens, n_threads) == expected, "a layer is the same from copies");
        }
    }
}

void all_tests() {
    rows_are_divided();
    lanes_work();
    copies_are_shared_and_right();
    pages_are_where_they_should_be();
    layers_are_the_same_from_copies();
}

// Nodes that are not here: memory for them cannot be placed, and everything else goes on.
void on_nodes_that_are_not_here() {
    Machine m = machine();
    const Node & real = m.nodes[0];
    m.nodes = {real, {900, 1, true}, {901, 2, true}};
    pretend_machine(m);
    rows_are_divided();
    copies_are_shared_and_right();
    layers_are_the_same_from_copies();
    const std::vector<std::string> troubles = memory_troubles();
    expect(troubles.size() == 2 && troubles[0].find("NUMA node 900") != std::string::npos, "each node's trouble is told once");
}

// 4 PiB, twice: no memory holds them, which is told once.
void what_does_not_fit_stays_in_its_file() {
    const size_t before = memory_troubles().size();
    for (uint64_t number : {100, 101}) {
        expect(!shared_copy("enormous", pieces(number), 1 << 20, 1 << 20, 4096), "more than memory holds is not promised");
    }
    const std::vector<std::string> troubles = memory_troubles();
    expect(troubles.size() == before + 1 && troubles.back().find("'enormous' (4294967296 MiB)") != std::string::npos, "that is told once");
    expect(shared_copy("small", pieces(102), 1, 1, 16) != nullptr, "what fits is copied all the same");
}

void be_the_first_process() {
    mkdir("/proc", 0755);
    mkdir("/sys", 0755);
    expect(mount("proc", "/proc", "proc", 0, nullptr) == 0 && mount("sysfs", "/sys", "sysfs", 0, nullptr) == 0, "mounts");
}

// What only a machine with several nodes can show.
void threads_stay_on_their_nodes() {
    struct Where {
        std::mutex mutex;
        std::set<std::pair<int, int>> thread_and_node;
    } where;
    for (int i = 0; i < 200; i++) {
        run_team(machine().n_usable(), [](void * context, int i_thread, int) {
            Where & w = *static_cast<Where *>(context);
            const std::lock_guard<std::mutex> lock(w.mutex);
            if (i_thread) w.thread_and_node.emplace(i_thread, node_here());
        }, &where);
    }
    std::set<int> threads, nodes;
    for (const auto & [t, n] : where.thread_and_node) {
        expect(threads.insert(t).second, "a thread never leaves its node");
        nodes.insert(n);
    }
    expect(nodes.size() == machine().nodes.size() || machine().n_usable() <= int(machine().nodes.size()), "every node has threads");
}

}  // namespace

int main() {
    if (getpid() == 1) be_the_first_process();
    printf("%s\n", machine().describe().c_str());
    expect(choose_team_provider("pool"), "the pool");
    if (machine().nodes.size() > 1 && machine().quota == 0) threads_stay_on_their_nodes();
    set_team_capacity(4);
    all_tests();
    if (machine().nodes.size() > 1) printf("%zu nodes: pages and threads are where they should be\n", machine().nodes.size());
    else on_nodes_that_are_not_here();
    what_does_not_fit_stays_in_its_file();
    puts("ok");
    stop(0);
}
