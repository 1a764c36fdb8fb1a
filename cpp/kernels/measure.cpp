// measure_read: plain 64-bit loads, which the compiler widens; memory is the limit with any of them.
#include "kernels/measure.h"

#include "threads/team.h"

#include <atomic>
#include <chrono>
#include <vector>

namespace hybrid_moe {
namespace {

constexpr int n_streams = 4;

struct Read {
    const uint64_t *      data;
    size_t                n_words;
    std::atomic<uint64_t> sink{0};
};

void read_part(void * context, int i_thread, int n_threads) {
    Read & read = *static_cast<Read *>(context);
    const size_t part = read.n_words / size_t(n_threads) / n_streams / 8 * 8;
    const uint64_t * base = read.data + size_t(i_thread) * part * n_streams;
    uint64_t sum[n_streams] = {};
    for (size_t i = 0; i < part; i += 8) {
        for (int s = 0; s < n_streams; s++) {
            const uint64_t * p = base + size_t(s) * part + i;
            sum[s] += p[0] ^ p[1] ^ p[2] ^ p[3] ^ p[4] ^ p[5] ^ p[6] ^ p[7];
        }
    }
    read.sink.fetch_add(sum[0] + sum[1] + sum[2] + sum[3], std::memory_order_relaxed);
}

struct Fma {
    const Kernels & kernels;
    std::atomic<int64_t> done{0};
};

constexpr int64_t multiply_adds = int64_t(1) << 30;  // some tens of milliseconds

void fma_part(void * context, int, int) {
    Fma & fma = *static_cast<Fma *>(context);
    fma.done.fetch_add(fma.kernels.multiply_add(multiply_adds), std::memory_order_relaxed);
}

double seconds_of(int n_threads, TeamFunction f, void * context) {
    const auto start = std::chrono::steady_clock::now();
    run_team(n_threads, f, context);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double measure_fma(const Kernels & kernels, int n_threads, int repeats) {
    double best = 0.0;
    for (int i = 0; i < repeats; i++) {
        Fma fma{kernels};
        const double seconds = seconds_of(n_threads, fma_part, &fma);
        const double rate = 2.0 * double(fma.done.load()) / seconds;
        best = rate > best ? rate : best;
    }
    return best;
}

double measure_read(int n_threads, size_t bytes, int repeats) {
    std::vector<uint64_t> data(bytes / sizeof(uint64_t), 1);
    double best = 0.0;
    for (int i = 0; i < repeats; i++) {
        Read read{data.data(), data.size()};
        const double seconds = seconds_of(n_threads, read_part, &read);
        const double rate = double(bytes) / seconds;
        best = rate > best ? rate : best;
    }
    return best;
}

}  // namespace hybrid_moe
