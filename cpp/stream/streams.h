// All streaming devices of the process, and the decision for each batch of a layer: the CPU, the devices (SLP on one,
// SmallEP on several), or devices with help from the CPU.
//
//   route (rows per expert) -> decide (predicted times) -> run (experts streamed, partial sums added)
#pragma once

#include "moe/moe_layer.h"
#include "stream/device_stream.h"
#include "stream/look_ahead.h"
#include "stream/rates.h"

#include <sys/types.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace hybrid_moe {

enum class Slp { automatic, on, off };

struct StreamOptions {
    Slp                      slp = Slp::automatic;
    bool                     all_devices = true;
    std::vector<std::string> devices;            // by name, when not all
    bool                     cpu_helps = true;   // hybrid split
    StreamSettings           device;
};

// Activations that a device holds already: [n_x_rows][n_embd], contiguous. layer.x has them only after to_host().
struct DeviceInput {
    const Gpu *           gpu    = nullptr;
    ggml_tensor *         tensor = nullptr;
    std::function<void()> to_host;
};

// What one context (ggml's back end instance) keeps between layers.
struct StreamContext {
    std::shared_ptr<const LayerExperts> previous;
    Routing                             route;
};

// What was decided for one batch; prints itself.
struct StreamPlan {
    bool                      streams = false;
    size_t                    n_cpu_experts = 0;
    double                    cpu_s = 0, devices_s = 0;  // predicted, of the whole layer on either
    std::vector<QueuedExpert> by_rows;                   // active experts, busiest first
    std::string               why;
    std::string print() const;
};

class Streams {
public:
    static Streams & get();

    // Before any layer runs; devices are looked for at the first batch that may stream.
    void choose(const StreamOptions & options);
    const StreamOptions & options() const { return options_; }

    // Whether a batch of so many tokens may stream at all; opens the devices when it is the first.
    bool may_stream(int64_t n_tokens);
    // Whether some device computes products with weights of that type.
    bool takes_type(ggml_type type);
    // What the host's own kernels took for a whole layer that ours do not run.
    void learn_cpu(const MoeLayer & layer, double seconds);

    // The devices that stream; empty when streaming is off.
    std::vector<Gpu> gpus();
    // The device of that ggml device; null when it is none of ours.
    const Gpu * gpu_of(ggml_backend_dev_t device) const;

    // Runs the layer, on devices where that is faster. not_here: the host's CPU kernels are to run it. `x`: where its input is
    // instead of layer.x; null: it is there. error: of 512 bytes, for the sentence of a failure.
    RunStatus run(const MoeLayer & layer, const RunOptions & options, Workspace & work, StreamContext & context,
                  const DeviceInput * x, char * error);

    // Memory on a device of ours that a context needs no more.
    void give_back(const Gpu & gpu, std::unique_ptr<GpuMemory> memory);

    // What long batches may use from now on: the devices with these names, and whether the CPU computes a part of a layer that
    // is streamed. Null: all. Devices see it before their next expert, the CPU before its next layer. False, with the reason
    // in `why`: nothing streams to such a device.
    bool allow(const std::vector<std::string> * devices, bool cpu, std::string & why);

    // Before a model's weights go: nothing of them is read any more when it returns.
    void forget();

    // Before the process ends: copies that were queued ahead are let through while their drivers are still there.
    void quiesce();

    // Counters, rates and troubles as a JSON object.
    std::string report();

    // Where a model's next layer lies, before a pass has shown it.
    void set_guess(LookAhead::Guess guess) { guess_ = std::move(guess); }

private:
    struct Pass;
    struct Running;
    void open();
    bool is_open_by_other_name(const Gpu & gpu) const;
    void note(const std::string & kind, const std::string & sentence);
    std::string name_of_rates(const Pass & pass) const;
    Rates rates_for(Pass & pass);
    void correct_cpu(const Pass & pass, Rates rates, double predicted_s, double seen_s);
    Rates calibrate(Pass & pass);
    void count_failure(size_t i_device, const LayerJob & job);
    CpuRate calibrate_cpu(const Pass & pass, const MoeLayer & sample);
    StreamPlan decide(const Pass & pass, const Rates & rates) const;
    std::vector<size_t> ready_devices(const Pass & pass, const DeviceIndex & index);
    void look_ahead(const std::vector<size_t> & devices, const LayerExperts & experts, size_t n_experts);
    std::vector<size_t> devices_in_use() const;
    bool lease(const std::vector<size_t> & devices, std::vector<std::unique_lock<std::mutex>> & leases);
    std::vector<QueuedExpert> divide(const Pass & pass, const StreamPlan & plan, const std::vector<size_t> & devices,
                                     std::vector<char> & for_cpu) const;
    // False when a device failed: the layer is the CPU's then.
    bool stream(const Pass & pass, const StreamPlan & plan, const std::vector<size_t> & devices, RunStatus & status, char * error);
    RunStatus run_pass(Pass & pass, char * error);
    int64_t tokens_per_pass(const MoeLayer & layer, const LayerExperts & experts);
    std::vector<DeviceRate> rates_of(const std::vector<size_t> & devices) const;

    StreamOptions                              options_;
    std::mutex                                 mutex_;  // opening, troubles, last plan
    bool                                       is_open_ = false;
    pid_t                                      pid_ = 0;  // that opened them: a forked child has none of the threads
    std::vector<std::unique_ptr<DeviceStream>> devices_;
    LookAhead                                  ahead_;
    LookAhead::Guess                           guess_;
    std::vector<std::pair<std::string, std::string>> troubles_;
    std::string                                last_plan_, last_rates_;
    std::map<ggml_type, bool>                  takes_;
    std::map<std::string, double>              stock_s_per_row_;  // by kind of layer
    std::unique_ptr<std::atomic<int>[]>        n_failures_;  // in a row, per device
    std::atomic<uint64_t>                      n_failed_jobs_{0};
    std::atomic<uint64_t>                      n_streamed_{0}, n_on_cpu_{0};  // layers that might have been streamed
    std::atomic<uint64_t>                      n_cpu_experts_{0};             // experts that the CPU took of streamed layers
};

}  // namespace hybrid_moe
