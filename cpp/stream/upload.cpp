// DeviceStream: the upload thread. One decision after another, each with the lock held; the work itself without it.
#include "stream/device_stream.h"

#include "stream/trace.h"

#include <algorithm>

namespace hybrid_moe {
namespace {

// Copies queued at once. The link must never wait for this thread to wake up.
constexpr size_t max_uploading = 4;

double seconds(int64_t ns) { return double(ns) * 1e-9; }

// Waits without the lock. Returns what went wrong, or "": Vulkan's waits throw when the device is lost.
template <class Wait> std::string wait_without(std::unique_lock<std::mutex> & lock, Wait && wait) {
    lock.unlock();
    std::string trouble;
    try {
        wait();
    } catch (const std::exception & e) {
        trouble = e.what();
    }
    lock.lock();
    return trouble;
}

}  // namespace

void DeviceStream::upload_loop() {
    Lock lock(mutex_);
    while (!stop_) {
        if (upload_step(lock)) continue;
        release_when_idle(lock);
        // Experts that others are predicted to finish earlier may become ours as time passes.
        const bool ask_again = job_ && !all_sent_;
        changed_.wait_for(lock, ask_again ? std::chrono::microseconds(500) : std::chrono::microseconds(200'000));
    }
    while (!uploading_.empty()) reap_upload(lock);
}

DeviceStream::Slot * DeviceStream::free_slot() {
    for (const auto & slot : slots_) {
        if (slot->state == Slot::free) return slot.get();
    }
    return nullptr;
}

size_t DeviceStream::n_free_slots() const {
    return size_t(std::count_if(slots_.begin(), slots_.end(), [](const auto & slot) { return slot->state == Slot::free; }));
}

// Does one thing; false when there is nothing to do now.
bool DeviceStream::upload_step(Lock & lock) {
    const bool has_job = job_ && !job_ended_ && !job_->is_cancelled();
    if (has_job && !inputs_sent_) return send_inputs(lock);
    if (uploading_.size() >= max_uploading) {
        reap_upload(lock);
        return true;
    }
    Slot * slot = free_slot();
    const bool may_go_on = permit().has_device(i_device_);
    if (has_job && !all_sent_ && !may_go_on && job_->queue.leave_to_others(i_worker_)) {
        all_sent_ = true;
        changed_.notify_all();
    }
    if (has_job && !all_sent_) {
        const auto expert = slot ? job_->queue.take(i_worker_, seconds(now_ns())) : std::nullopt;
        if (expert) return start_fill(lock, *slot, job_->experts, *expert, false);
        if (job_->queue.is_empty()) {
            all_sent_ = true;
            changed_.notify_all();
        }
    }
    // While experts are left that may become ours, one slot stays free for them.
    const bool has_room = slot && (!has_job || all_sent_ || n_free_slots() > 1);
    if (next_ && !next_order_.empty() && has_room && may_go_on) {
        const int64_t expert = next_order_.front();
        next_order_.pop_front();
        return start_fill(lock, *slot, next_, expert, true);
    }
    if (uploading_.empty()) return false;
    reap_upload(lock);
    return true;
}

void DeviceStream::send_x(const MoeLayer & layer) {
    const size_t row = size_t(batch_->shape.n_embd_in) * sizeof(float);
    const bool one_stride = layer.n_x_slots == 1 || layer.x_slot_stride * layer.n_x_slots == layer.x_token_stride;
    if (one_stride) {
        const int64_t stride = layer.n_x_slots == 1 ? layer.x_token_stride : layer.x_slot_stride;
        filler_.send_rows(upload_, batch_->x, layer.x, batch_->shape.n_x_rows, row, stride);
        return;
    }
    for (int64_t t = 0; t < layer.ids.n_tokens; t++) {
        for (int64_t s = 0; s < layer.n_x_slots; s++) {
            const uint8_t * from = layer.x + t * layer.x_token_stride + s * layer.x_slot_stride;
            filler_.send(upload_, batch_->x, from, size_t(t * layer.n_x_slots + s) * row, row);
        }
    }
}

void DeviceStream::send_biases(const MoeLayer & layer) {
    const Projection * projections[n_parts] = {&layer.gate, &layer.up, &layer.down};
    for (size_t i = 0; i < n_parts; i++) {
        const Projection & p = *projections[i];
        ggml_tensor * to = batch_->bias[i];
        if (!to || !p.bias.data) continue;
        for (int64_t e = 0; e < batch_->shape.n_bias_experts; e++) {
            filler_.send(upload_, to, p.bias.of(e), size_t(e) * to->nb[1], size_t(p.n_rows) * sizeof(float));
        }
    }
}

bool DeviceStream::send_inputs(Lock & lock) {
    LayerJob & job = *job_;
    inputs_sent_ = true;
    uploading_.push_back(nullptr);
    const int64_t begin = now_ns();
    lock.unlock();
    std::string trouble;
    try {
        if (batch_->x) send_x(job.layer);
        filler_.send(upload_, batch_->x_index, job.index.x_row.data(), 0, job.index.x_row.size() * sizeof(int32_t));
        filler_.send(upload_, batch_->y_index, job.index.y_row.data(), 0, job.index.y_row.size() * sizeof(int32_t));
        filler_.send(upload_, batch_->weight, job.index.weight.data(), 0, job.index.weight.size() * sizeof(float));
        send_biases(job.layer);
        inputs_fence_.set(upload_);
    } catch (const std::exception & e) {
        trouble = e.what();
    }
    lock.lock();
    link_free_ns_ = std::max(link_free_ns_, begin);
    if (!trouble.empty()) fail(trouble);
    if (batch_->x) counters_.in_bytes += size_t(batch_->shape.n_embd_in * batch_->shape.n_x_rows) * sizeof(float);
    return true;
}

bool DeviceStream::start_fill(Lock & lock, Slot & slot, std::shared_ptr<const LayerExperts> experts, int64_t i_expert, bool is_ahead) {
    slot.state    = Slot::filling;
    slot.experts  = experts;
    slot.i_expert = i_expert;
    slot.is_ahead = is_ahead;
    slot.is_claimed = !is_ahead;
    slot.begin_ns = now_ns();
    uploading_.push_back(&slot);
    if (is_ahead) n_reading_ahead_++;
    const Kernels & kernels = *settings_.kernels;
    lock.unlock();
    const char * damage = nullptr;
    std::string trouble;
    try {
        if (!slot.shape || !slot.shape->has_shape_of(*experts)) {
            auto tensors = std::make_unique<SlotTensors>(*experts, form_of(*experts));
            tensors->place(gpu_, slot.memory);
            slot.n_bytes = tensors->n_bytes(gpu_);
            slot.tensors.swap(tensors);
            slot.shape = experts;
            const Lock again(mutex_);
            retired_.push_back(std::move(tensors));
        }
        damage = filler_.fill(upload_, *experts, i_expert, *slot.tensors, kernels);
        slot.uploaded.set(upload_);
    } catch (const std::exception & e) {
        trouble = e.what();
    }
    lock.lock();
    if (!damage && trouble.empty()) return true;
    // Damaged weights end the layer that computes them, which may have claimed this expert by now; ahead of time they are
    // nobody's problem yet.
    slot.i_expert = -1;
    if (damage && !slot.is_claimed) next_order_.clear();
    else fail(damage ? damage : trouble, damage != nullptr);
    return true;
}

// Waits for the oldest copy and hands its slot on.
void DeviceStream::reap_upload(Lock & lock) {
    Slot * slot = uploading_.front();
    const std::string trouble = wait_without(lock, [&] { (slot ? slot->uploaded : inputs_fence_).wait(); });
    const int64_t end = now_ns();
    uploading_.pop_front();
    if (!trouble.empty()) {
        if (slot) slot->i_expert = -1;
        fail(trouble);
    }
    const int64_t begin = slot ? std::max(slot->begin_ns, link_free_ns_) : std::max(job_began_, link_free_ns_);
    link_free_ns_ = end;
    if (!slot) {
        inputs_there_ = true;
        if (job_) trace_span(gpu_.name, "upload", "inputs", begin, end, job_->experts->name(), -1, job_->layer.ids.n_tokens,
                             batch_->x ? size_t(batch_->shape.n_embd_in * batch_->shape.n_x_rows) * sizeof(float) : 0);
    } else {
        const size_t bytes = slot->n_bytes;
        counters_.upload_ns += end - begin;
        counters_.source_bytes += slot->experts->source_bytes();
        counters_.expert_bytes += bytes;
        if (slot->is_ahead) {
            counters_.ahead_bytes += bytes;
            n_reading_ahead_--;
        }
        trace_span(gpu_.name, "upload", slot->is_ahead ? "expert ahead" : "expert", begin, end, slot->experts->name(), slot->i_expert, 0, bytes);
        const bool is_wanted = slot->i_expert >= 0 && (!slot->is_claimed || (job_ && !job_ended_ && !job_->is_cancelled()));
        slot->state = is_wanted ? Slot::ready : Slot::free;
        if (is_wanted && slot->is_claimed) ready_.push_back(slot);
    }
    if (uploading_.empty()) {
        // Some back ends keep what they queued until they are synchronised as a whole.
        const std::string why = wait_without(lock, [&] { upload_.synchronize(); });
        if (!why.empty()) fail(why);
    }
    changed_.notify_all();
}

void DeviceStream::release_when_idle(Lock & lock) {
    if (job_ || (slots_.empty() && given_back_.empty()) || now_ns() - last_use_ns_ < settings_.idle_ns) return;
    lock.unlock();
    {
        const std::unique_lock<std::mutex> nobody(lease_, std::try_to_lock);
        lock.lock();
        if (!nobody || job_ || now_ns() - last_use_ns_ < settings_.idle_ns || !uploading_.empty()) return;
        next_.reset();
        next_order_.clear();
        slots_.clear();
        batch_.reset();
        batch_memory_.reset();
        expanded_.clear();
        given_back_.clear();
        slot_bytes_ = 0;
    }
}

}  // namespace hybrid_moe
