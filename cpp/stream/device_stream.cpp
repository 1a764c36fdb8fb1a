// DeviceStream: its memory, and the calls of the thread that runs a layer. The two loops are in upload.cpp and compute.cpp.
#include "stream/device_stream.h"

#include "stream/trace.h"

#include <algorithm>

namespace hybrid_moe {
namespace {

constexpr int    result_chunks = 3;
constexpr size_t n_areas       = 2;  // for expanded FP8

}  // namespace

DeviceStream::DeviceStream(const Gpu & gpu, const StreamSettings & settings)
    : gpu_(gpu), settings_(settings), upload_(gpu_), compute_(std::make_unique<Instance>(gpu_)), n_freed_(GpuMemory::n_freed()),
      filler_(gpu_, settings.copy_threads), result_(gpu_, result_piece_bytes, result_chunks), result_crew_(settings.copy_threads),
      last_use_ns_(now_ns()) {
    expander_ = find_fp8_expander(gpu_, why_no_expander_);
    upload_thread_  = std::thread([this] { upload_loop(); });
    compute_thread_ = std::thread([this] { compute_loop(); });
}

DeviceStream::~DeviceStream() {
    {
        const Lock lock(mutex_);
        stop_ = true;
    }
    changed_.notify_all();
    upload_thread_.join();
    compute_thread_.join();
}

size_t DeviceStream::budget() const {
    size_t n_free = 0, n_total = 0;
    gpu_.memory(n_free, n_total);
    const Lock lock(mutex_);
    size_t mine = slots_.size() * slot_bytes_ + (batch_memory_ ? batch_memory_->size() : 0);
    for (const auto & e : expanded_) mine += e->memory.size();
    // Back ends that do not know what is free report the total: never more than that.
    const size_t all = std::min(n_free + mine, n_total);
    return size_t(double(all) * settings_.vram_share);
}

void DeviceStream::drop_slots(Lock & lock) {
    next_.reset();
    next_order_.clear();
    changed_.notify_all();
    changed_.wait(lock, [&] { return uploading_.empty() && n_reading_ahead_ == 0; });
    for (const auto & slot : slots_) {
        if (slot->is_waiting()) counters_.wasted_bytes += slot->n_bytes;
    }
    slots_.clear();
    slot_bytes_ = 0;
}

Fp8Form DeviceStream::form_of(const LayerExperts & experts) const {
    return expander_ && experts.may_be_codes() ? Fp8Form::codes : Fp8Form::bf16;
}

size_t DeviceStream::least_bytes(const LayerExperts & experts) const {
    const Fp8Form form = form_of(experts);
    const size_t areas = form == Fp8Form::codes ? n_areas * SlotTensors(experts, Fp8Form::bf16).n_bytes(gpu_) : 0;
    return 2 * SlotTensors(experts, form).n_bytes(gpu_) + areas;
}

// With the lock held, and nothing being computed.
void DeviceStream::make_expanded(const LayerExperts & experts, Fp8Form form) {
    if (form == Fp8Form::bf16) {
        expanded_.clear();
        return;
    }
    const size_t n_bytes = SlotTensors(experts, Fp8Form::bf16).n_bytes(gpu_);
    if (!expanded_.empty() && expanded_[0]->memory.size() < n_bytes) expanded_.clear();
    while (expanded_.size() < n_areas) expanded_.push_back(std::make_unique<Expanded>(gpu_, n_bytes));
    for (const auto & e : expanded_) {
        e->tensors = std::make_unique<SlotTensors>(experts, Fp8Form::bf16);
        e->tensors->place(gpu_, e->memory);
    }
}

// Memory of at least n_bytes for batches. The ring was built around a smaller one, or leaves it no room since less is free: it
// goes then. With the lock held, and nothing being computed.
void DeviceStream::make_batch_memory(Lock & lock, size_t n_bytes, size_t at_most) {
    if (batch_memory_ && batch_memory_->size() >= n_bytes && batch_memory_->size() <= at_most) return;
    if (batch_memory_) drop_slots(lock);
    batch_.reset();
    batch_memory_.reset();
    batch_memory_ = std::make_unique<GpuMemory>(gpu_, n_bytes);
}

// Two slots at least, and as many more as `room` allows and a layer of n_experts can use. With the lock held.
void DeviceStream::make_ring(size_t room, size_t n_experts) {
    if (settings_.ring_bytes) room = std::min(room, settings_.ring_bytes);
    const size_t affordable = std::max<size_t>(2, room / slot_bytes_);
    // Others may have taken memory since the ring was built. Slots with experts that were fetched ahead stay for now.
    for (size_t i = slots_.size(); i-- > 0 && slots_.size() > affordable;) {
        if (slots_[i]->state == Slot::free) slots_.erase(slots_.begin() + std::ptrdiff_t(i));
    }
    const size_t wanted = std::min(affordable, std::max<size_t>(2, n_experts));
    while (slots_.size() < wanted) {
        try {
            slots_.push_back(std::make_unique<Slot>(gpu_, slot_bytes_));
        } catch (const DeviceError &) {
            if (slots_.size() >= 2) return;  // less was free than the device said
            throw;
        }
    }
}

void DeviceStream::check_support(const MoeLayer & layer, const LayerExperts & experts) const {
    SlotTensors tensors(experts, Fp8Form::bf16);
    tensors.pretend(slots_[0]->memory);
    const TensorContext scratch(ExpertGraph::max_nodes);
    if (const ggml_tensor * node = ExpertGraph(layer, *batch_, x_).unsupported(gpu_, scratch, tensors)) {
        throw DeviceError(gpu_.name + ": the device cannot compute " + host().ggml_op_name(node->op) + " of " +
                          (node->src[0] ? host().ggml_type_name(node->src[0]->type) : "?") + " as this layer (" + experts.name() +
                          ") needs it");
    }
}

void DeviceStream::make_room(const MoeLayer & layer, const LayerExperts & experts, const BatchShape & shape, ggml_tensor * x) {
    const size_t may        = budget();
    const Fp8Form form      = form_of(experts);
    const size_t slot_bytes = SlotTensors(experts, form).n_bytes(gpu_);
    const size_t least      = least_bytes(experts);
    auto batch = std::make_unique<BatchTensors>(shape, x != nullptr);
    const size_t batch_bytes = batch->n_bytes(gpu_);
    Lock lock(mutex_);
    last_use_ns_ = now_ns();
    given_back_.clear();
    if (batch_bytes + least > may) {
        throw DeviceError(gpu_.name + ": " + std::to_string(may >> 20) + " MiB of its memory may be used, and two experts with a batch of " +
                          std::to_string(shape.n_tokens) + " tokens need " + std::to_string((batch_bytes + least) >> 20) + " MiB");
    }
    make_batch_memory(lock, batch_bytes, may - least);
    const size_t areas = least - 2 * slot_bytes;
    const size_t room  = may - batch_memory_->size() - areas;
    // All slots are of one size; made for the experts of another layer they may be too small, or two of them too much by now.
    if (slot_bytes > slot_bytes_ || 2 * slot_bytes_ > room) drop_slots(lock);
    if (slots_.empty()) slot_bytes_ = slot_bytes;
    make_expanded(experts, form);
    make_ring(room, size_t(experts.n_expert()));
    if (n_freed_ != GpuMemory::n_freed()) {
        const uint64_t n_freed = GpuMemory::n_freed();
        compute_ = std::make_unique<Instance>(gpu_);
        n_freed_ = n_freed;
    }
    batch_ = std::move(batch);
    batch_->place(gpu_, *batch_memory_);
    x_ = x ? x : batch_->x;
    check_support(layer, experts);
}

std::vector<int64_t> DeviceStream::there(const LayerExperts & experts) {
    const Lock lock(mutex_);
    std::vector<int64_t> all;
    for (const auto & slot : slots_) {
        if (slot->is_waiting() && slot->experts->is_same(experts)) all.push_back(slot->i_expert);
    }
    return all;
}

void DeviceStream::start(LayerJob & job, int i_worker) {
    const Lock lock(mutex_);
    next_.reset();
    next_order_.clear();
    ready_.clear();
    for (const auto & slot : slots_) {
        if (!slot->is_waiting()) continue;
        const bool is_wanted = slot->experts->is_same(*job.experts) && job.queue.claim(i_worker, slot->i_expert, double(now_ns()) * 1e-9);
        if (!is_wanted) counters_.wasted_bytes += slot->n_bytes;
        slot->is_claimed = is_wanted;
        if (slot->state == Slot::filling) {  // it becomes ready, or free, when it has arrived
            if (!is_wanted) slot->i_expert = -1;
            continue;
        }
        slot->state = is_wanted ? Slot::ready : Slot::free;
        if (is_wanted) ready_.push_back(slot.get());
    }
    job_          = &job;
    i_worker_     = i_worker;
    inputs_sent_  = inputs_there_ = all_sent_ = job_ended_ = false;
    job_began_    = now_ns();
    changed_.notify_all();
}

void DeviceStream::give_back(std::unique_ptr<GpuMemory> memory) {
    const Lock lock(mutex_);
    given_back_.push_back(std::move(memory));
}

bool DeviceStream::finish(std::chrono::milliseconds patience) {
    Lock lock(mutex_);
    if (!changed_.wait_for(lock, patience, [&] { return job_ended_; })) return false;
    job_ = nullptr;
    last_use_ns_ = now_ns();
    changed_.notify_all();
    return true;
}

void DeviceStream::look_ahead(std::shared_ptr<const LayerExperts> next, std::vector<int64_t> order) {
    const Lock lock(mutex_);
    if (slots_.empty() || SlotTensors(*next, form_of(*next)).n_bytes(gpu_) > slot_bytes_) return;
    next_ = std::move(next);
    next_order_.assign(order.begin(), order.end());
    changed_.notify_all();
}

void DeviceStream::forget() {
    Lock lock(mutex_);
    next_.reset();
    next_order_.clear();
    changed_.notify_all();
    changed_.wait(lock, [&] { return n_reading_ahead_ == 0; });
    for (const auto & slot : slots_) {
        if (!slot->is_waiting()) continue;
        counters_.wasted_bytes += slot->n_bytes;
        slot->state = Slot::free;
        slot->experts.reset();
    }
}

// Forgets what was fetched ahead and has not been claimed. What is still on its way becomes free when it has arrived.
void DeviceStream::drop_ahead() {
    next_.reset();
    next_order_.clear();
    for (const auto & slot : slots_) {
        if (!slot->is_waiting()) continue;
        counters_.wasted_bytes += slot->n_bytes;
        if (slot->state == Slot::filling) slot->i_expert = -1;
        else slot->state = Slot::free;
    }
}

void DeviceStream::quiesce(int64_t until_ns) {
    do {
        if (mutex_.try_lock()) {
            next_.reset();
            next_order_.clear();
            const bool is_busy = !uploading_.empty();
            mutex_.unlock();
            if (!is_busy) return;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    } while (now_ns() < until_ns);
}

void DeviceStream::fail(const std::string & why, bool is_damage) {
    if (job_) job_->cancel(i_worker_, why, is_damage);
    // Copies report no failure of their own, so it may be one of those that failed: a device that is told to compute tells once.
    if (!is_damage) drop_ahead();
    counters_.n_failures++;
    changed_.notify_all();
}

DeviceRate DeviceStream::rate() const {
    const Lock lock(mutex_);
    return rate_;
}

void DeviceStream::reset_rate() {
    const Lock lock(mutex_);
    rate_      = DeviceRate{};
    s_per_row_ = 0;
}

void DeviceStream::know_rate(const DeviceRate & rate) {
    const Lock lock(mutex_);
    if (rate_.copy_s_per_byte == 0) rate_ = rate;
}

StreamCounters DeviceStream::counters() const {
    const Lock lock(mutex_);
    return counters_;
}

size_t DeviceStream::n_slots() const {
    const Lock lock(mutex_);
    return slots_.size();
}

size_t DeviceStream::slot_bytes() const {
    const Lock lock(mutex_);
    return slot_bytes_;
}

size_t DeviceStream::batch_bytes() const {
    const Lock lock(mutex_);
    return batch_memory_ ? batch_memory_->size() : 0;
}

}  // namespace hybrid_moe
