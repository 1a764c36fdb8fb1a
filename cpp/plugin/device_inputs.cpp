// DeviceInputs.
#include "plugin/device_inputs.h"

#include <algorithm>

namespace hybrid_moe {
namespace {

// What is smaller is on the host sooner than it is kept.
constexpr int64_t min_columns = 32;

}  // namespace

struct DeviceInputs::Kept {
    DeviceInput                    input;
    TensorContext                  context{1};
    std::unique_ptr<GpuMemory>     memory;
    const Gpu *                    gpu_of_memory = nullptr;
    ggml_tensor *                  tensor = nullptr;
    uint8_t *                      host_data = nullptr;
    size_t                         n_bytes = 0;
    bool                           is_on_host = false;

    bool overlaps(const uint8_t * data, size_t n) const { return data < host_data + n_bytes && host_data < data + n; }

    ~Kept() { give_back(); }

    // The device may have computed from it: not freed here.
    void give_back() {
        if (memory) Streams::get().give_back(*gpu_of_memory, std::move(memory));
    }

    void to_host() {
        if (!is_on_host) host().ggml_backend_tensor_get(tensor, host_data, 0, n_bytes);
        is_on_host = true;
    }
};

DeviceInputs::DeviceInputs() = default;
DeviceInputs::~DeviceInputs() = default;

bool DeviceInputs::keep(ggml_backend_t from, const ggml_tensor * src, const ggml_tensor * dst) {
    // A graph that was given up may have left one.
    if (dst->data) forget(static_cast<const uint8_t *>(dst->data), int64_t(host().ggml_nbytes(dst)));
    if (src->type != GGML_TYPE_F32 || src->ne[0] < min_columns || !src->buffer || !dst->data) return false;
    const bool is_contiguous = src->nb[0] == sizeof(float) && src->nb[1] == size_t(src->ne[0]) * sizeof(float) &&
                               src->nb[2] == src->nb[1] * size_t(src->ne[1]) && src->ne[3] == 1;
    if (!is_contiguous) return false;
    const int64_t n_rows = src->ne[1] * src->ne[2];
    if (!Streams::get().may_stream(n_rows)) return false;
    const Gpu * gpu = Streams::get().gpu_of(src->buffer->buft->device);
    if (!gpu) return false;
    try {
        if (n_ == kept_.size()) kept_.push_back(std::make_unique<Kept>());
        Kept & k = *kept_[n_];
        k.n_bytes = size_t(n_rows) * src->nb[1];
        if (!k.memory || k.memory->size() < k.n_bytes || k.gpu_of_memory != gpu) {
            k.give_back();
            k.memory = std::make_unique<GpuMemory>(*gpu, k.n_bytes);
            k.gpu_of_memory = gpu;
        }
        k.context.reset();
        k.tensor = host().ggml_new_tensor_2d(k.context.get(), GGML_TYPE_F32, src->ne[0], n_rows);
        k.memory->place(k.tensor, 0);
        // Back ends differ in whether a copy between two instances waits for what the first has queued.
        host().ggml_backend_synchronize(from);
        ggml_tensor flat = *src;  // one shape on both sides
        flat.ne[1] = n_rows;
        flat.ne[2] = 1;
        flat.nb[2] = flat.nb[3] = k.n_bytes;
        host().ggml_backend_tensor_copy(&flat, k.tensor);
        k.host_data  = static_cast<uint8_t *>(dst->data);
        k.is_on_host = false;
        k.input      = {gpu, k.tensor, [&k] { k.to_host(); }};
        n_++;
        return true;
    } catch (const DeviceError &) {  // no room there: the host has it
        return false;
    }
}

const DeviceInput * DeviceInputs::find(const uint8_t * data, int64_t n_rows, int64_t row_bytes) {
    for (size_t i = 0; i < n_; i++) {
        const Kept & k = *kept_[i];
        if (k.host_data == data && !k.is_on_host && k.tensor->ne[1] == n_rows && int64_t(k.tensor->nb[1]) == row_bytes) return &k.input;
    }
    return nullptr;
}

void DeviceInputs::all_to_host() {
    for (size_t i = 0; i < n_; i++) kept_[i]->to_host();
}

void DeviceInputs::forget(const uint8_t * data, int64_t n_bytes) {
    for (size_t i = 0; i < n_;) {
        if (kept_[i]->overlaps(data, size_t(n_bytes))) kept_[i].swap(kept_[--n_]);
        else i++;
    }
}

void DeviceInputs::clear() {
    constexpr int n_idle_graphs = 4096;  // some dozens of tokens: a prompt is over
    n_idle_ = n_ ? 0 : n_idle_ + 1;
    if (n_idle_ == n_idle_graphs) kept_.clear();
    n_ = 0;
}

}  // namespace hybrid_moe
