// DeviceStream: the compute thread.
#include "stream/device_stream.h"

#include "stream/trace.h"

#include <algorithm>

namespace hybrid_moe {
namespace {

// Experts queued at once. One would leave the device idle while this thread wakes up. One is no help to a decoder on the same
// device either (tests/engine_two_gpus.py, modes one and small): devices take operations of several instances by turns.
constexpr size_t max_queued = 3;

// Graphs that are queued between two synchronisations of the instance: back ends look at a graph until then.
constexpr size_t max_graphs = 64;

// A wait for a fence that is shorter found it passed.
constexpr int64_t no_wait_ns = 20'000;

// Other devices and the caller end a job without waking this thread.
constexpr auto poll = std::chrono::milliseconds(10);

}  // namespace

void DeviceStream::compute_loop() {
    Lock lock(mutex_);
    for (;;) {
        changed_.wait(lock, [&] { return stop_ || (job_ && !job_ended_); });
        if (stop_ && (!job_ || job_ended_)) return;
        LayerJob & job = *job_;
        lock.unlock();
        run_job(job);
        lock.lock();
    }
}

void DeviceStream::run_job(LayerJob & job) {
    try {
        batch_memory_->zero(batch_->y);
        run_experts(job, ExpertGraph(job.layer, *batch_, x_));
        drain();
        if (!job.is_cancelled()) fetch_result(job);
        if (!job.is_cancelled()) confirm();
    } catch (const std::exception & e) {
        const Lock lock(mutex_);
        fail(e.what());
    }
    end_job(job);
}

// Everything that belongs to the job is back, whatever happened to it.
void DeviceStream::end_job(LayerJob & job) {
    try {
        drain();
    } catch (const std::exception & e) {
        const Lock lock(mutex_);
        computing_.clear();  // nothing of it will end
        fail(e.what());
    }
    Lock lock(mutex_);
    if (job.is_cancelled()) job.queue.leave(i_worker_);
    inputs_sent_ = all_sent_ = true;  // nothing more is begun for it
    changed_.notify_all();
    changed_.wait(lock, [&] {
        return std::none_of(uploading_.begin(), uploading_.end(), [](const Slot * s) { return !s || s->is_claimed; });
    });
    for (const auto & slot : slots_) {
        if (slot->is_claimed) slot->state = Slot::free;
        if (slot->is_claimed) slot->is_claimed = slot->is_ahead = false;
    }
    ready_.clear();
    counters_.n_layers++;
    counters_.layer_ns += now_ns() - job_began_;
    if (!job.is_cancelled()) learn_rates();
    job_ended_ = true;
    changed_.notify_all();
}

// From what this job took; the past counts for half.
void DeviceStream::learn_rates() {
    const auto blend = [](double & known, double seen) { known = known == 0 ? seen : (known + seen) / 2; };
    const uint64_t bytes = counters_.source_bytes - before_.source_bytes;
    if (bytes) blend(rate_.copy_s_per_byte, double(counters_.upload_ns - before_.upload_ns) * 1e-9 / double(bytes));
    if (chained_rows_) blend(rate_.compute_s_per_row, double(chained_ns_) * 1e-9 / double(chained_rows_));
    before_ = counters_;
    chained_rows_ = chained_ns_ = 0;
}

void DeviceStream::run_experts(LayerJob & job, const ExpertGraph & graph) {
    Lock lock(mutex_);
    while (!inputs_there_ && !job.is_cancelled()) changed_.wait_for(lock, poll);
    idle_since_ = compute_free_ns_ = now_ns();
    while (!job.is_cancelled()) {
        if (!ready_.empty() && computing_.size() < max_computing()) {
            Slot & slot = *ready_.front();
            ready_.pop_front();
            slot.state = Slot::computing;
            if (computing_.empty()) counters_.starved_ns += now_ns() - idle_since_;
            lock.unlock();
            submit(job, graph, slot);
            lock.lock();
            computing_.push_back(&slot);  // not before: what is in there may be reaped while submit() drains
            continue;
        }
        if (!computing_.empty()) {
            // Not before it is likely to have ended: the next expert may arrive while this one is computed, and must not wait
            // until this thread wakes up. But a slot that others wait for is given back as soon as it can be.
            const Slot & oldest = *computing_.front();
            const int64_t begin = std::max(oldest.begin_ns, compute_free_ns_);
            const int64_t ends = begin + int64_t(double(oldest.n_rows) * s_per_row_ * 1e9);
            if (computing_.size() < max_computing() && now_ns() < ends) {
                changed_.wait_for(lock, std::chrono::nanoseconds(ends - now_ns()), [&] { return !ready_.empty() || job.is_cancelled(); });
                if (!ready_.empty()) continue;
            }
            reap_compute(lock);
            continue;
        }
        const bool may_come = !all_sent_ || std::any_of(uploading_.begin(), uploading_.end(), [](const Slot * s) { return s && s->is_claimed; });
        if (!may_come) break;
        changed_.wait_for(lock, poll);
    }
}

const TensorContext & DeviceStream::next_context() {
    if (n_contexts_used_ == max_graphs) drain();
    if (n_contexts_used_ == contexts_.size()) contexts_.push_back(std::make_unique<TensorContext>(ExpertGraph::max_nodes));
    return *contexts_[n_contexts_used_++];
}

// Areas are used by turns, so the expert before the last must have left its one.
size_t DeviceStream::max_computing() const { return expanded_.empty() ? max_queued : std::min(max_queued, expanded_.size()); }

// The slot's expert with its codes expanded, while the expert before it is being computed.
const SlotTensors & DeviceStream::expanded(const Slot & slot) {
    const Expanded & area = *expanded_[n_expanded_++ % expanded_.size()];
    std::string why;
    for (size_t i = 0; i < n_parts; i++) {
        const PartWeights & part = slot.experts->parts[i];
        if (!part.exists()) continue;
        if (!slot.tensors->scales[i]) throw DeviceError(gpu_.name + ": a layer of FP8 experts has other experts in it");
        if (!expander_->expand(slot.tensors->parts[i], slot.tensors->scales[i], area.tensors->parts[i], part.block_rows, part.block_k, why)) {
            throw DeviceError(why);
        }
    }
    if (!expander_->wait(why)) throw DeviceError(why);
    return *area.tensors;
}

void DeviceStream::submit(LayerJob & job, const ExpertGraph & graph, Slot & slot) {
    const int64_t n_rows = job.route.n_rows(slot.i_expert);
    const int64_t tile   = batch_->shape.tile_rows;
    const SlotTensors & tensors = expanded_.empty() ? *slot.tensors : expanded(slot);
    slot.begin_ns = now_ns();
    for (int i = 0; i < job.n_repeats; i++) {
        for (int64_t row = 0; row < n_rows; row += tile) {
            const ExpertRows rows = {slot.i_expert, job.index.begin[size_t(slot.i_expert)] + row, std::min(tile, n_rows - row)};
            compute_->compute(graph.build(next_context(), tensors, rows));
        }
    }
    slot.n_rows = n_rows * job.n_repeats;
    slot.computed.set(*compute_);
}

// Waits for the oldest computation and gives its slot back.
void DeviceStream::reap_compute(Lock & lock) {
    Slot & slot = *computing_.front();
    lock.unlock();
    const int64_t asked = now_ns();
    slot.computed.wait();
    const int64_t seen = now_ns();
    lock.lock();
    computing_.pop_front();
    const int64_t begin = std::max(slot.begin_ns, compute_free_ns_);
    const int64_t end   = learn_end(slot, begin, asked, seen);
    compute_free_ns_ = end;
    if (computing_.empty()) idle_since_ = end;
    counters_.compute_ns += end - begin;
    counters_.n_experts++;
    counters_.n_rows += uint64_t(slot.n_rows);
    trace_span(gpu_.name, "compute", "expert", begin, end, slot.experts->name(), slot.i_expert, slot.n_rows, 0);
    slot.state      = Slot::free;
    slot.is_claimed = slot.is_ahead = false;
    changed_.notify_all();
}

// When a computation ended, from when it was asked for and seen to have ended. Only a wait that took time shows the true end;
// otherwise it is estimated, and the next one is asked for earlier.
int64_t DeviceStream::learn_end(const Slot & slot, int64_t begin, int64_t asked, int64_t seen) {
    if (slot.n_rows < 1) return seen;
    const double rows = double(slot.n_rows);
    if (seen - asked < no_wait_ns && s_per_row_ > 0) {
        const int64_t end = std::clamp(begin + int64_t(rows * s_per_row_ * 1e9), begin, seen);
        s_per_row_ *= 0.8;
        return end;
    }
    const double s_per_row = double(seen - begin) * 1e-9 / rows;
    s_per_row_ = s_per_row_ == 0 ? s_per_row : std::min(s_per_row, s_per_row_ * 1.25);  // the host's hiccups only make it longer
    // Between two ends that this thread woke up for, its delays cancel. Alone, an expert seems to take that much longer.
    if (slot.begin_ns <= compute_free_ns_ || job_->n_repeats > 1) {
        chained_ns_ += seen - begin;
        chained_rows_ += slot.n_rows;
    }
    return seen;
}

// Waits for all that was queued. Graphs' memory may be used again then.
void DeviceStream::drain() {
    Lock lock(mutex_);
    while (!computing_.empty()) reap_compute(lock);
    lock.unlock();
    compute_->synchronize();
    lock.lock();
    n_contexts_used_ = 0;
    retired_.clear();
}

void DeviceStream::fetch_result(LayerJob & job) {
    const int64_t begin  = now_ns();
    const size_t row     = size_t(batch_->shape.n_embd_out) * sizeof(float);
    const size_t n_bytes = row * size_t(batch_->shape.n_tokens);
    const size_t piece   = std::min(size_t(job.sums.piece_rows()) * row, result_.chunk_bytes() / row * row);
    const size_t n_pieces = (n_bytes + piece - 1) / piece;
    // Devices begin at different pieces, so that they seldom wait for one another.
    const size_t first = size_t(i_worker_) * n_pieces / 4 % n_pieces;
    result_.fetch(*compute_, batch_->y, n_bytes, piece, first, [&](size_t offset, size_t n, const uint8_t * bytes) {
        if (!job.is_cancelled()) job.sums.add(int64_t(offset / row), int64_t(n / row), reinterpret_cast<const float *>(bytes), result_crew_);
    });
    const int64_t end = now_ns();
    const Lock lock(mutex_);
    counters_.out_bytes += n_bytes;
    trace_span(gpu_.name, "compute", "result", begin, end, job.experts->name(), -1, batch_->shape.n_tokens, n_bytes);
}

// Copies report no failure: devices that had one refuse the next graph.
void DeviceStream::confirm() {
    const TensorContext context(8);
    ggml_cgraph * graph = host().ggml_new_graph_custom(context.get(), ExpertGraph::max_nodes, false);
    ggml_tensor * one = host().ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, 1);
    batch_->memory->place(one, batch_->work[0]);
    ggml_tensor * out = host().ggml_scale(context.get(), one, 1.0f);
    batch_->memory->place(out, batch_->work[0]);
    host().ggml_build_forward_expand(graph, out);
    compute_->compute(graph);
    compute_->synchronize();
}

}  // namespace hybrid_moe
