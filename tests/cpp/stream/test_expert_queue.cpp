// Who takes which expert, against models in which time is a number: nothing lost, nothing twice, ends close to the ideal;
// the CPU's share against every other one; the rates' file, damaged and not.
#include "expect.h"
#include "stream/expert_queue.h"
#include "stream/rates.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <fstream>
#include <locale>
#include <numeric>
#include <random>
#include <set>
#include <thread>

using namespace hybrid_moe;

namespace {

constexpr uint64_t n_bytes = 44'000'000;  // of an expert
std::mt19937 rng(7);

int64_t between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(rng); }

std::vector<QueuedExpert> experts(int64_t n, int64_t low, int64_t high) {
    std::vector<QueuedExpert> all;
    for (int64_t e = 0; e < n; e++) all.push_back({e, between(low, high)});
    return all;
}

std::vector<QueuedExpert> sorted(std::vector<QueuedExpert> all) {
    std::sort(all.begin(), all.end(), [](const QueuedExpert & a, const QueuedExpert & b) { return a.n_rows > b.n_rows; });
    return all;
}

DeviceRate link(double gbps, double s_per_row = 0) {
    DeviceRate r;
    r.copy_s_per_byte   = 1e-9 / gbps;
    r.compute_s_per_row = s_per_row;
    return r;
}

// Devices that really have some rates, while the queue believes in others: each asks when its link is free, again a little
// later when it gets nothing. Returns when each has computed its last expert. `absent` never asks.
struct Race {
    std::vector<double> ends;
    std::vector<int>    n_taken;
};

Race race(ExpertQueue & queue, const std::vector<DeviceRate> & real, const std::vector<QueuedExpert> & all, int absent = -1) {
    constexpr double start = 1000;  // clocks do not begin at 0
    std::vector<double> link_free(real.size(), start), compute_free(real.size(), start);
    Race r{std::vector<double>(real.size(), 0), std::vector<int>(real.size(), 0)};
    std::set<int64_t> seen;
    for (int step = 0; !queue.is_empty(); step++) {
        expect(step < 1'000'000, "the queue becomes empty");
        size_t i = real.size();
        for (size_t w = 0; w < real.size(); w++) {
            if (int(w) != absent && (i == real.size() || link_free[w] < link_free[i])) i = w;
        }
        const double now = link_free[i];
        const auto e = queue.take(int(i), now);
        if (!e) {
            link_free[i] = now + 0.0005;
            continue;
        }
        expect(seen.insert(*e).second, "no expert is given twice");
        const auto rows = std::find_if(all.begin(), all.end(), [&](const QueuedExpert & q) { return q.expert == *e; })->n_rows;
        link_free[i]    = now + double(n_bytes) * real[i].copy_s_per_byte;
        compute_free[i] = std::max(link_free[i], compute_free[i]) + double(rows) * real[i].compute_s_per_row;
        r.ends[i] = compute_free[i] - start;
        r.n_taken[i]++;
    }
    expect(seen.size() == all.size(), "all experts are given");
    return r;
}

void equal_links() {
    for (size_t n_devices : {2, 3, 4}) {
        for (int64_t n : {1, 7, 64, 255}) {
            const auto all = experts(n, 1, 600);
            const std::vector<DeviceRate> rates(n_devices, link(24));
            ExpertQueue queue(all, n_bytes, rates);
            const Race r = race(queue, rates, all);
            const auto [low, high] = std::minmax_element(r.n_taken.begin(), r.n_taken.end());
            expect(*high - *low <= 1, "equal links end within one expert of each other");
        }
    }
}

// The time in which links of these rates bring all that there is, if experts could be divided.
double ideal(const std::vector<DeviceRate> & rates, size_t n) {
    double per_s = 0;
    for (const DeviceRate & r : rates) per_s += 1 / (double(n_bytes) * r.copy_s_per_byte);
    return double(n) / per_s;
}

void unequal_links() {
    for (const auto & gbps : {std::pair{24.0, 6.0}, std::pair{6.0, 24.0}, std::pair{24.0, 12.0}}) {
        const auto all = experts(128, 1, 600);
        const std::vector<DeviceRate> rates = {link(gbps.first), link(gbps.second)};
        ExpertQueue queue(all, n_bytes, rates);
        const Race r = race(queue, rates, all);
        const double end = *std::max_element(r.ends.begin(), r.ends.end());
        expect(end <= 1.1 * ideal(rates, all.size()), "unequal links are within 10 % of the ideal split");
    }
}

void wrong_rates() {
    // One device is five times slower than it was believed to be: it gets less, and the layer is not five times longer.
    const auto all = experts(128, 1, 600);
    const std::vector<DeviceRate> believed = {link(24), link(24)}, real = {link(24), link(4.8)};
    ExpertQueue queue(all, n_bytes, believed);
    const Race r = race(queue, real, all);
    expect(*std::max_element(r.ends.begin(), r.ends.end()) <= 1.15 * ideal(real, all.size()), "a slow device gets less");
}

void bound_by_compute() {
    const auto all = experts(64, 400, 600);
    const std::vector<DeviceRate> rates = {link(24, 1e-4), link(24, 2e-4)};
    ExpertQueue queue(all, n_bytes, rates);
    const Race r = race(queue, rates, all);
    const double longest = *std::max_element(r.ends.begin(), r.ends.end());
    const double rows = std::accumulate(all.begin(), all.end(), 0.0, [](double n, const QueuedExpert & e) { return n + double(e.n_rows); });
    expect(longest <= 1.1 * rows / (1e4 + 5e3), "devices bound by compute are within 10 % of the ideal split");
}

void absent_worker() {
    for (double gbps : {2.4, 24.0, 240.0}) {  // slower, equal, much faster than the one that asks
        const auto all = experts(64, 1, 600);
        const std::vector<DeviceRate> rates = {link(24), link(gbps)};
        ExpertQueue queue(all, n_bytes, rates);
        queue.take(1, 1000.0);  // it was there once
        std::vector<QueuedExpert> rest = all;
        ExpertQueue never(all, n_bytes, rates);
        if (gbps <= 24) expect(race(never, rates, all, 1).n_taken[0] == 64, "one that never came does not keep experts from others");
        double now = 1000;
        for (int step = 0; !queue.is_empty(); step++) {
            expect(step < 100'000, "one that comes no more does not keep experts from others");
            now += queue.take(0, now) ? double(n_bytes) * rates[0].copy_s_per_byte : 0.0005;
        }
        expect(queue.n_taken(0) == 63 && queue.n_taken(1) == 1, "experts are counted");
    }
    ExpertQueue queue(experts(8, 1, 2), n_bytes, {link(24), link(1e6)});
    queue.leave(1);
    for (int i = 0; i < 8; i++) expect(queue.take(0, 1.0).has_value(), "one that has left gets nothing more");
    // Several that leave to one another: the last one stays, whoever it is.
    ExpertQueue three(experts(8, 1, 2), n_bytes, {link(24), link(24), link(1)});
    expect(three.leave_to_others(1) && three.leave_to_others(0) && !three.leave_to_others(2), "the last one stays");
    int n = 0;
    for (double now = 1; !three.is_empty(); now += 1) n += three.take(2, now).has_value();
    expect(n == 8, "it takes what is left, slow as it is");
    ExpertQueue alone(experts(8, 1, 2), n_bytes, {link(24)});
    expect(!alone.leave_to_others(0), "there are no others");
}

void claims() {
    const auto all = experts(16, 1, 600);
    ExpertQueue queue(all, n_bytes, {link(24), link(24)});
    expect(queue.claim(0, 3, 1000.0) && !queue.claim(1, 3, 1000.0) && !queue.claim(0, 16, 1000.0), "an expert is claimed once");
    int n = 1;
    for (double now = 1000; !queue.is_empty(); now += 0.001) n += queue.take(n % 2, now).has_value();
    expect(n == 16 && !queue.claim(0, 5, 1000.0), "what is claimed is not given");
    expect(queue.n_taken(0) + queue.n_taken(1) == 16, "claims are counted");
    // The rows of what was claimed keep its device busy.
    ExpertQueue busy({{0, 1000}, {1, 10}, {2, 9}}, 1, {link(1e6, 1e-3), link(1e6, 1e-3)});
    expect(busy.claim(0, 0, 1000.0) && !busy.take(0, 1000.0), "claimed rows count in predictions");
    expect(busy.take(1, 1000.0) && busy.take(1, 1000.0), "the other device takes what is left");
}

void many_threads() {
    for (int round = 0; round < 20; round++) {
        const auto all = experts(300, 1, 100);
        ExpertQueue queue(all, n_bytes, {link(24), link(12), link(6), link(24)});
        std::vector<std::atomic<int>> given(300);
        std::atomic<int64_t> clock{1000};
        std::vector<std::thread> threads;
        for (int w = 0; w < 4; w++) {
            threads.emplace_back([&, w] {
                for (int64_t e = w; e < 300; e += 29) {
                    if (queue.claim(w, e, double(clock++) * 1e-3)) given[size_t(e)]++;
                }
                while (!queue.is_empty()) {
                    if (const auto e = queue.take(w, double(clock++) * 1e-3)) given[size_t(*e)]++;
                    else std::this_thread::yield();
                    if (w == 3 && queue.n_taken(3) > 20) return queue.leave(3);
                }
            });
        }
        for (std::thread & t : threads) t.join();
        for (const auto & n : given) expect(n == 1, "threads get every expert once");
        expect(queue.n_taken(0) + queue.n_taken(1) + queue.n_taken(2) + queue.n_taken(3) == 300, "experts are counted");
    }
}

void predictions() {
    const std::vector<QueuedExpert> two = {{0, 100}, {1, 10}};
    DeviceRate r = link(1e-9 * double(n_bytes), 0.5);  // a second per expert, half a second per row
    r.copy_s = 0.25, r.compute_s = 0.125;
    expect(std::abs(predict(two, n_bytes, {r}) - (1.25 + 50.125 + 5.125)) < 1e-9, "the copy of the second hides behind the first");
    expect(std::abs(predict(two, n_bytes, {r, r}) - (1.25 + 50.125)) < 1e-9, "two devices, one each");
    expect(predict({}, n_bytes, {r}) == 0 && predict(two, n_bytes, {}) == 0, "nothing to do");
    // The queue does what was predicted when rates are right.
    for (int round = 0; round < 50; round++) {
        const auto all = sorted(experts(between(1, 100), 1, 600));
        const std::vector<DeviceRate> rates = {link(double(between(5, 50)), 1e-5), link(double(between(5, 50)), 1e-5)};
        ExpertQueue queue(all, n_bytes, rates);
        const Race real = race(queue, rates, all);
        const double end = *std::max_element(real.ends.begin(), real.ends.end());
        const double slowest = double(n_bytes) * std::max(rates[0].copy_s_per_byte, rates[1].copy_s_per_byte) + 600 * 1e-5;
        expect(end <= predict(all, n_bytes, rates) + slowest, "it ends as predicted, to an expert");
    }
}

void shares_of_cpu() {
    for (int round = 0; round < 300; round++) {
        const auto all = sorted(experts(between(1, 80), 1, between(1, 1000)));
        std::vector<DeviceRate> devices;
        for (int64_t d = between(1, 3); d > 0; d--) devices.push_back(link(double(between(1, 60)), double(between(0, 20)) * 1e-6));
        const CpuRate cpu = {double(between(0, 20)) * 1e-4, double(between(1, 200)) * 1e-6};
        const auto ends = [&](size_t n) {
            double rows = 0;
            for (size_t i = all.size() - n; i < all.size(); i++) rows += double(all[i].n_rows);
            const std::vector<QueuedExpert> rest(all.begin(), all.end() - std::ptrdiff_t(n));
            return std::max(double(n) * cpu.s_per_expert + rows * cpu.s_per_row, predict(rest, n_bytes, devices));
        };
        double best = ends(0);
        for (size_t n = 1; n <= all.size(); n++) best = std::min(best, ends(n));
        const size_t n = share_of_cpu(all, n_bytes, devices, cpu);
        // List scheduling on several devices is not quite monotonic in what it has to do.
        expect(ends(n) <= best * (devices.size() == 1 ? 1 + 1e-9 : 1.02), "no other share of the CPU's would end sooner");
    }
}

std::string number_line(const std::string & name, const std::string & numbers) { return name + "\t" + numbers + "\n"; }

struct DecimalComma : std::numpunct<char> {
    char do_decimal_point() const override { return ','; }
};

void rates_file(const std::string & folder) {
    std::locale::global(std::locale(std::locale::classic(), new DecimalComma));  // hosts may do that
    setenv("XDG_CACHE_HOME", folder.c_str(), 1);
    const std::string path = rates_path();
    expect(path == folder + "/hybrid-moe/rates-1.tsv", "where it is");
    expect(!known_rates("nobody", 1), "no file");
    mkdir((folder + "/hybrid-moe").c_str(), 0700);
    std::ofstream(path) << number_line("old", "1 2 3 4 5 6") << number_line("fine", "1\t2\t3\t4\t5\t6") << number_line("fine", "2\t2\t3\t4\t5\t6")
                        << number_line("two", "1\t2\t3\t4\t5\t6\t7\t8\t9\t10") << number_line("short", "1\t2\t3") << number_line("word", "1\t2\t3\t4\tx\t6")
                        << number_line("minus", "1\t2\t3\t4\t-5\t6") << number_line("nan", "1\t2\tnan\t4\t5\t6") << number_line("inf", "1\t2\tinf\t4\t5\t6")
                        << number_line("huge", "1\t2\t1e999\t4\t5\t6") << number_line("long", "1\t2\t3\t4\t5\t6\t7") << number_line("tail", "1\t2\t3\t4\t5\t6zz")
                        << std::string("\0\xff\xfe\tgarbage\n\n\t\t\n", 16) << number_line("empty", "") << "finer\t1\t2\t3\t4\t5\t6\n"
                        << std::string(100'000, 'y') << "\ntorn\t1\t2";
    const auto fine = known_rates("fine", 1);
    expect(fine && fine->cpu.s_per_expert == 2 && fine->devices.size() == 1 && fine->devices[0].compute_s == 6, "the last line counts");
    expect(known_rates("two", 2) && !known_rates("two", 1) && !known_rates("fine", 2), "another number of devices");
    for (const char * bad : {"short", "word", "minus", "nan", "inf", "huge", "long", "tail", "empty", "torn", "fin", ""}) {
        expect(!known_rates(bad, 1), std::string("a damaged line is no line: ") + bad);
    }
    Rates r;
    r.cpu = {0.5, 0.25};
    r.devices = {DeviceRate{1, 2, 3, 4}, DeviceRate{5, 6, 7, 8}};
    keep_rates("kept", r);
    keep_rates("kept", r);
    expect(known_rates("kept", 2)->devices[1].compute_s_per_row == 7, "what is kept is known");
    expect(r.print().find("device 1") != std::string::npos, "rates print themselves");
    std::ifstream file(path);
    const std::string all((std::istreambuf_iterator<char>(file)), {});
    expect(all.find("\nkept\t0.5\t0.25\t1\t2\t3\t4\t5\t6\t7\t8\n") != std::string::npos, "and in the file, behind a torn line");
    // A folder that cannot be made, and none at all: known to this process only.
    setenv("XDG_CACHE_HOME", "/dev/null/nowhere", 1);
    keep_rates("only here", r);
    expect(known_rates("only here", 2).has_value(), "without a file");
    unsetenv("XDG_CACHE_HOME");
    setenv("HOME", "", 1);
    expect(rates_path().empty(), "nowhere");
    keep_rates("nowhere", r);
    expect(known_rates("nowhere", 2).has_value() && !known_rates("unknown", 2), "without a place");
    expect(!cpu_name().empty(), "the processor has a name");
}

}  // namespace

int main(int argc, char ** argv) {
    expect(argc == 2, "usage: test-expert-queue FOLDER");
    equal_links();
    unequal_links();
    wrong_rates();
    bound_by_compute();
    absent_worker();
    claims();
    many_threads();
    predictions();
    shares_of_cpu();
    rates_file(argv[1]);
    puts("ok");
}
