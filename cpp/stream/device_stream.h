// One GPU device that computes experts out of a ring of slots: an upload thread fills slots through its own instance of the
// device, a compute thread runs them through another. A slot is used again when the computation that read it has ended.
// When a layer's experts are all on their way, the upload thread goes on with those of the next layer (look-ahead): they
// arrive while the host computes attention.
//
//   free -> filling -> ready -> computing -> free
#pragma once

#include "stream/filler.h"
#include "stream/fp8_expander.h"
#include "stream/layer_job.h"
#include "stream/permit.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <thread>

namespace hybrid_moe {

struct StreamSettings {
    const Kernels * kernels = nullptr;
    double  vram_share   = 0.8;    // of what is free when a ring is built
    size_t  ring_bytes   = 0;      // at most; 0: as the share allows
    int     copy_threads = 1;      // that fill pinned chunks
    int64_t idle_ns      = int64_t(30) * 1'000'000'000;  // without work for so long, device memory is given back
};

// What a device has done since the process began.
struct StreamCounters {
    uint64_t n_layers = 0, n_experts = 0, n_rows = 0;
    uint64_t source_bytes = 0;     // of experts, as they are stored
    uint64_t expert_bytes = 0;     // that crossed the link for them
    uint64_t ahead_bytes = 0;      // of these, before their layer began
    uint64_t wasted_bytes = 0;     // of these, never used
    uint64_t in_bytes = 0, out_bytes = 0;  // activations
    int64_t  upload_ns = 0;        // the link up was busy with experts
    int64_t  compute_ns = 0;       // an expert was being computed
    int64_t  starved_ns = 0;       // a layer was running, and the compute thread waited for a copy
    int64_t  layer_ns = 0;         // begin to end
    uint64_t n_failures = 0;
};

class DeviceStream {
public:
    // Throws DeviceError. All devices are opened by one thread.
    DeviceStream(const Gpu & gpu, const StreamSettings & settings);
    ~DeviceStream();
    DeviceStream(const DeviceStream &) = delete;
    DeviceStream & operator=(const DeviceStream &) = delete;

    const Gpu & gpu() const { return gpu_; }

    // Its number in the permit (permit.h). Before any job.
    void set_number(size_t i_device) { i_device_ = i_device; }

    // Everything below is for one thread at a time, which holds the lock.
    std::mutex & lease() { return lease_; }

    // Bytes that ring and batch may take together, with what they have.
    size_t budget() const;
    // Of that, what two slots and all that goes with them need.
    size_t least_bytes(const LayerExperts & experts) const;
    // Device memory for such a batch and at least two slots. Throws DeviceError. `x` is a tensor of this device, or null.
    void make_room(const MoeLayer & layer, const LayerExperts & experts, const BatchShape & shape, ggml_tensor * x);
    // Experts of these tensors that are in slots already, or on their way.
    std::vector<int64_t> there(const LayerExperts & experts);
    void start(LayerJob & job, int i_worker);
    bool finish(std::chrono::milliseconds patience);  // true when the job has ended here, however it did
    // What to fetch when the current layer needs nothing more: these experts in this order.
    void look_ahead(std::shared_ptr<const LayerExperts> next, std::vector<int64_t> order);
    // Rates seen so far; zeros before the first layer.
    DeviceRate rate() const;
    void reset_rate();
    void know_rate(const DeviceRate & rate);  // from elsewhere; what was seen here counts more

    // Memory that a context has used with this device: freed when nothing computes here.
    void give_back(std::unique_ptr<GpuMemory> memory);

    // Returns when no expert that was fetched ahead is being read, and forgets them all. Any thread, without the lock.
    void forget();
    // The same at the end of the process, where a lock may be held for good: waits no longer than until then.
    void quiesce(int64_t until_ns);

    StreamCounters counters() const;
    // "codes cross the link", or why they do not.
    std::string fp8_path() const { return expander_ ? "codes cross the link" : why_no_expander_; }
    size_t n_slots() const;
    size_t slot_bytes() const;
    size_t batch_bytes() const;
    size_t host_bytes() const { return filler_.host_bytes() + result_.size(); }
    const Filler & filler() const { return filler_; }

private:
    struct Slot;
    using Lock = std::unique_lock<std::mutex>;

    // upload.cpp
    void upload_loop();
    bool upload_step(Lock & lock);
    bool send_inputs(Lock & lock);
    void send_x(const MoeLayer & layer);
    void send_biases(const MoeLayer & layer);
    bool start_fill(Lock & lock, Slot & slot, std::shared_ptr<const LayerExperts> experts, int64_t i_expert, bool is_ahead);
    void reap_upload(Lock & lock);
    Slot * free_slot();
    size_t n_free_slots() const;
    void release_when_idle(Lock & lock);

    // compute.cpp
    void compute_loop();
    void run_job(LayerJob & job);
    void run_experts(LayerJob & job, const ExpertGraph & graph);
    void submit(LayerJob & job, const ExpertGraph & graph, Slot & slot);
    const SlotTensors & expanded(const Slot & slot);
    size_t max_computing() const;
    void reap_compute(Lock & lock);
    int64_t learn_end(const Slot & slot, int64_t begin, int64_t asked, int64_t seen);
    void drain();
    void learn_rates();
    void end_job(LayerJob & job);
    void fetch_result(LayerJob & job);
    void confirm();
    const TensorContext & next_context();

    Fp8Form form_of(const LayerExperts & experts) const;
    void make_batch_memory(Lock & lock, size_t n_bytes, size_t at_most);
    void make_ring(size_t room, size_t n_experts);
    void check_support(const MoeLayer & layer, const LayerExperts & experts) const;
    void make_expanded(const LayerExperts & experts, Fp8Form form);
    void drop_slots(Lock & lock);
    void drop_ahead();
    void fail(const std::string & why, bool is_damage = false);

    const Gpu            gpu_;
    std::atomic<size_t>  i_device_ = Permit::max_devices;  // always permitted
    const StreamSettings settings_;
    std::mutex           lease_;
    Instance                  upload_;
    std::unique_ptr<Instance> compute_;
    uint64_t                  n_freed_ = 0;  // when compute_ was made
    Filler               filler_;
    Staging              result_;
    Crew                 result_crew_;

    mutable std::mutex      mutex_;
    std::condition_variable changed_;
    bool                    stop_ = false;

    // Device memory.
    std::vector<std::unique_ptr<Slot>> slots_;
    std::vector<std::unique_ptr<GpuMemory>> given_back_;
    // Back ends may look at a graph's tensors until they are synchronised as a whole.
    std::vector<std::unique_ptr<SlotTensors>> retired_;
    size_t                             slot_bytes_ = 0;
    std::unique_ptr<GpuMemory>         batch_memory_;
    std::unique_ptr<BatchTensors>      batch_;
    ggml_tensor *                      x_ = nullptr;
    // Where FP8 codes become BF16, by turns: one is computed from while the next is written.
    struct Expanded {
        Expanded(const Gpu & gpu, size_t n_bytes) : memory(gpu, n_bytes) {}
        GpuMemory                    memory;
        std::unique_ptr<SlotTensors> tensors;
    };
    std::unique_ptr<Fp8Expander>           expander_;
    std::string                            why_no_expander_;
    std::vector<std::unique_ptr<Expanded>> expanded_;  // empty: slots are computed from as they are
    size_t                                 n_expanded_ = 0;

    // The job.
    LayerJob *         job_ = nullptr;
    int                i_worker_ = 0;
    bool               inputs_sent_ = false, inputs_there_ = false;
    bool               all_sent_ = false;    // no more experts will be uploaded for it
    bool               job_ended_ = true;
    int64_t            job_began_ = 0;
    std::deque<Slot *> ready_;

    // On their way.
    std::deque<Slot *> uploading_;           // null: the inputs
    Fence              inputs_fence_;
    int64_t            link_free_ns_ = 0;    // when the link was last seen to be free
    std::deque<Slot *> computing_;
    int64_t            compute_free_ns_ = 0;
    int64_t            idle_since_ = 0;                  // when nothing was left to compute
    int64_t            chained_ns_ = 0, chained_rows_ = 0;  // of experts that followed one another without a gap
    double             s_per_row_ = 0;       // seen, for predicting when a computation ends

    // Ahead.
    std::shared_ptr<const LayerExperts> next_;
    std::deque<int64_t>                 next_order_;
    int                                 n_reading_ahead_ = 0;

    std::vector<std::unique_ptr<TensorContext>> contexts_;
    size_t                                      n_contexts_used_ = 0;
    int64_t        last_use_ns_ = 0;
    StreamCounters counters_, before_;       // before_: when rates were last learnt
    DeviceRate     rate_;

    std::thread upload_thread_, compute_thread_;
};

struct DeviceStream::Slot {
    enum State { free, filling, ready, computing };

    Slot(const Gpu & gpu, size_t size) : memory(gpu, size) {}

    // Fetched ahead, and its layer has not come yet.
    bool is_waiting() const { return is_ahead && !is_claimed && i_expert >= 0 && (state == filling || state == ready); }

    GpuMemory                           memory;
    State                               state = free;
    std::unique_ptr<SlotTensors>        tensors;
    std::shared_ptr<const LayerExperts> shape;    // that the tensors were made for
    size_t                              n_bytes = 0;  // of the tensors: what crosses the link
    std::shared_ptr<const LayerExperts> experts;  // whose expert it holds
    int64_t                             i_expert = -1;
    bool                                is_ahead   = false;  // fetched before its layer began
    bool                                is_claimed = false;  // by the job
    Fence                               uploaded, computed;
    int64_t                             begin_ns = 0;
    int64_t                             n_rows   = 0;
};

}  // namespace hybrid_moe
