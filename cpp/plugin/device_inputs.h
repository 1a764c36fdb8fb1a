// Inputs of our splits that come from a streaming device and stay there: the scheduler offers each to cpy_tensor_async, and
// the host gets the bytes only when something of ours reads them there.
#pragma once

#include "plugin/host.h"
#include "stream/streams.h"

#include <memory>
#include <vector>

namespace hybrid_moe {

class DeviceInputs {
public:
    DeviceInputs();
    ~DeviceInputs();
    DeviceInputs(const DeviceInputs &) = delete;
    DeviceInputs & operator=(const DeviceInputs &) = delete;

    // Keeps a copy of src on its device instead of copying it to dst. False: copy it as ever.
    bool keep(ggml_backend_t from, const ggml_tensor * src, const ggml_tensor * dst);

    // The one that stands for host memory at `data`, rows of `row_bytes` one after another; null when there is none.
    const DeviceInput * find(const uint8_t * data, int64_t n_rows, int64_t row_bytes);

    // Copies all that are still missing to the host.
    void all_to_host();

    // These bytes hold something else now: inputs that lay there have been read for the last time.
    void forget(const uint8_t * data, int64_t n_bytes);

    // The graph has run. After many without any input on a device, their memory is given back.
    void clear();

private:
    struct Kept;
    std::vector<std::unique_ptr<Kept>> kept_;
    int                                n_idle_ = 0;  // graphs
    size_t                             n_ = 0;  // in use; the others' memory waits for the next graph
};

}  // namespace hybrid_moe
