// Filler.
#include "stream/filler.h"

#include "stream/pinned.h"
#include "stream/trace.h"

#include <algorithm>
#include <cstring>

namespace hybrid_moe {
namespace {

// Small enough that several are on their way at once, large enough that a copy's latency does not show.
constexpr size_t chunk_bytes = size_t(4) << 20;
constexpr int    n_chunks    = 8;
constexpr size_t trial_bytes = size_t(1) << 20;
constexpr size_t copy_unit   = size_t(64) << 10;  // what one thread copies at least

// Round to nearest, ties to even. Codes times finite scales: no NaN.
uint16_t bf16_of(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

void expand_row(const ExpertMatrix & m, int64_t i_row, const Kernels & kernels, uint8_t * out) {
    constexpr int64_t piece = 512;
    float values[piece];
    for (int64_t i0 = 0; i0 < m.k; i0 += piece) {
        const int64_t n = std::min(piece, m.k - i0);
        kernels.expand(m, i_row, i0, n, values);
        for (int64_t i = 0; i < n; i++) {
            const uint16_t h = bf16_of(values[i]);
            memcpy(out + 2 * (i0 + i), &h, sizeof h);
        }
    }
}

}  // namespace

Filler::Filler(const Gpu & gpu, int n_threads) : gpu_(&gpu), staging_(gpu, chunk_bytes, n_chunks), crew_(n_threads) {}

// What is pinned for another device may be as good as one's own, or may make the driver wait and stage: tried once.
bool Filler::send_directly(Instance & to, ggml_tensor * tensor, const uint8_t * from, size_t offset, size_t n_bytes) {
    const Pinned pinned = is_pinned_for(*gpu_, from, n_bytes);
    if (pinned == Pinned::no) return false;
    if (pinned == Pinned::for_another && !foreign_is_fast_.has_value() && n_bytes >= trial_bytes) try_foreign(to, tensor, from, offset);
    if (pinned == Pinned::for_another && !foreign_is_fast_.value_or(false)) return false;
    for (size_t done = 0; done < n_bytes;) {
        const size_t n = bytes_in_one_pin(from + done, n_bytes - done);
        to.set(tensor, from + done, offset + done, n);
        done += n;
    }
    direct_bytes_ += n_bytes;
    return true;
}

void Filler::try_foreign(Instance & to, ggml_tensor * tensor, const uint8_t * from, size_t offset) {
    to.synchronize();
    const int64_t t0 = now_ns();
    to.set(tensor, from, offset, trial_bytes);
    to.synchronize();
    const int64_t t1 = now_ns();
    foreign_is_fast_ = false;  // so that this is staged
    send(to, tensor, from, offset, trial_bytes);
    to.synchronize();
    foreign_is_fast_ = t1 - t0 < now_ns() - t1;
}

void Filler::send(Instance & to, ggml_tensor * tensor, const void * data, size_t offset, size_t n_bytes) {
    const uint8_t * from = static_cast<const uint8_t *>(data);
    if (send_directly(to, tensor, from, offset, n_bytes)) return;
    for (size_t done = 0; done < n_bytes;) {
        const size_t n = std::min(n_bytes - done, staging_.chunk_bytes());
        uint8_t * chunk = staging_.next();
        crew_.share(int64_t((n + copy_unit - 1) / copy_unit), [&](int64_t begin, int64_t end) {
            const size_t first = size_t(begin) * copy_unit;
            memcpy(chunk + first, from + done + first, std::min(size_t(end) * copy_unit, n) - first);
        });
        staging_.send(to, tensor, offset + done, n);
        done += n;
    }
    staged_bytes_ += n_bytes;
}

void Filler::send_rows(Instance & to, ggml_tensor * tensor, const uint8_t * rows, int64_t n_rows, size_t n_bytes, int64_t stride) {
    if (size_t(stride) == n_bytes || n_rows == 1) return send(to, tensor, rows, 0, n_bytes * size_t(n_rows));
    const int64_t per_chunk = std::max<int64_t>(1, int64_t(staging_.chunk_bytes() / n_bytes));
    for (int64_t row = 0; row < n_rows; row += per_chunk) {
        const int64_t n = std::min(per_chunk, n_rows - row);
        uint8_t * chunk = staging_.next();
        crew_.share(n, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++) memcpy(chunk + size_t(i) * n_bytes, rows + (row + i) * stride, n_bytes);
        });
        staging_.send(to, tensor, size_t(row) * n_bytes, size_t(n) * n_bytes);
        staged_bytes_ += size_t(n) * n_bytes;
    }
}

void Filler::send_bytes(Instance & to, const PartWeights & part, int64_t i_expert, ggml_tensor * tensor) {
    const size_t row_bytes = part.weights.shape.row_bytes;
    const int64_t end = part.row0 + part.n_rows;
    for (int64_t row = part.row0, row_end; row < end; row = row_end) {
        const ExpertMatrix m = part.weights.matrix(i_expert, row, row_end);
        row_end = std::min(row_end, end);
        send(to, tensor, m.row(row), size_t(row - part.row0) * row_bytes, size_t(row_end - row) * row_bytes);
    }
}

void Filler::send_expanded(Instance & to, const PartWeights & part, int64_t i_expert, ggml_tensor * tensor, const Kernels & kernels) {
    const size_t row_bytes = part.device_row_bytes();
    const int64_t per_chunk = std::max<int64_t>(1, int64_t(staging_.chunk_bytes() / row_bytes));
    const int64_t end = part.row0 + part.n_rows;
    for (int64_t row = part.row0; row < end;) {
        int64_t row_end;
        const ExpertMatrix m = part.weights.matrix(i_expert, row, row_end);
        const int64_t n = std::min(per_chunk, std::min(row_end, end) - row);
        uint8_t * chunk = staging_.next();
        crew_.share(n, [&](int64_t begin, int64_t last) {
            for (int64_t i = begin; i < last; i++) expand_row(m, row + i, kernels, chunk + size_t(i) * row_bytes);
        });
        staging_.send(to, tensor, size_t(row - part.row0) * row_bytes, size_t(n) * row_bytes);
        staged_bytes_ += size_t(n) * row_bytes;
        row += n;
    }
}

void Filler::send_scales(Instance & to, const PartWeights & part, int64_t i_expert, ggml_tensor * tensor) {
    int64_t row_end;
    const ExpertMatrix m = part.weights.matrix(i_expert, part.row0, row_end);
    send(to, tensor, m.row_scale(part.row0), 0, size_t(part.n_scales()) * sizeof(float));
}

const char * Filler::fill(Instance & to, const LayerExperts & experts, int64_t i_expert, const SlotTensors & slot, const Kernels & kernels) {
    for (size_t i = 0; i < n_parts; i++) {
        const PartWeights & part = experts.parts[i];
        if (!part.exists()) continue;
        if (!part.weights.is_ready(i_expert)) {
            if (const char * what = part.weights.scattered->make_ready(i_expert, kernels)) return what;
        }
        if (part.is_fp8() && !slot.scales[i]) {
            send_expanded(to, part, i_expert, slot.parts[i], kernels);
            continue;
        }
        send_bytes(to, part, i_expert, slot.parts[i]);
        if (slot.scales[i]) send_scales(to, part, i_expert, slot.scales[i]);
    }
    return nullptr;
}

}  // namespace hybrid_moe
