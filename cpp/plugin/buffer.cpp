// Buffer type and buffers: allocation without commitment, zero copy from the host's mapping, tensors that live elsewhere.
#include "plugin/buffer.h"

#include "checkpoint/expert_table.h"
#include "plugin/describe.h"
#include "plugin/device.h"
#include "plugin/mapped_file.h"
#include "plugin/scale_search.h"
#include "plugin/settings.h"
#include "plugin/weight_directory.h"
#include "stream/pinned.h"
#include "stream/streams.h"
#include "threads/placement.h"

#include <sys/mman.h>

#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>

namespace hybrid_moe {
namespace {

constexpr size_t alignment = 64;  // ggml's CPU buffers promise no more, and kernels assume none

struct BufferContext {
    uint8_t * base  = nullptr;
    size_t    size  = 0;
    bool      owned = false;
    bool      has_experts = false;
    std::vector<std::shared_ptr<void>> pins;  // of results that devices write and read
    std::shared_ptr<const void> trailer;  // of the mapped file, if it has one
    // Tensors whose bytes lie in a checkpoint: their own memory stays empty.
    std::map<const ggml_tensor *, std::unique_ptr<ExpertTensor>> aliases;
};

BufferContext & context_of(ggml_backend_buffer_t buffer) { return *static_cast<BufferContext *>(buffer->context); }

void free_buffer(ggml_backend_buffer_t buffer) {
    BufferContext * ctx = &context_of(buffer);
    if (ctx->has_experts) {  // a device may be reading them ahead of time
        forget_weights(buffer);
        Streams::get().forget();
    }
    ctx->pins.clear();
    if (ctx->owned && ctx->base) munmap(ctx->base, ctx->size);
    delete ctx;
}

void * get_base(ggml_backend_buffer_t buffer) { return context_of(buffer).base; }

bool matches(const ggml_tensor * t, const ExpertTensor::Shape & s) {
    WeightType type;
    return (s.type == WeightType::foreign || (weight_type_of(t->type, type) && type == s.type)) && t->ne[0] == s.k && t->ne[1] == s.n_rows &&
           t->ne[2] == s.n_expert && t->ne[3] == 1;
}

// The experts behind a new tensor: declared by the load's table, or FP8 codes of a GGUF whose scales are searched.
std::unique_ptr<ExpertTensor> experts_of(const ggml_tensor * tensor) {
    if (const std::shared_ptr<ExpertTable> & table = ExpertTable::loading()) {
        if (auto experts = table->bind(tensor->name, static_cast<uint8_t *>(tensor->data))) return experts;
    }
    if (tensor->type != GGML_TYPE_I8 || tensor->op != GGML_OP_NONE || tensor->ne[2] < 1 || tensor->ne[3] != 1) return nullptr;
    const ExpertTensor::Shape shape = {WeightType::fp8_e4m3, tensor->ne[2], tensor->ne[1], tensor->ne[0], size_t(tensor->ne[0])};
    return find_scales(tensor->name, shape, static_cast<uint8_t *>(tensor->data));
}

// A weight that can only be one of experts; intermediate results have an operation, or one row per expert used.
bool is_expert_weight(const ggml_tensor * t, ExpertTensor::Shape & shape) {
    if (t->op != GGML_OP_NONE || t->ne[2] < 2 || t->ne[1] < 2 || t->ne[0] < 16 || t->ne[3] != 1) return false;
    shape = weights_of(t).shape;
    return t->nb[2] == t->nb[1] * size_t(t->ne[1]);
}

// Experts of a GGUF in the host's mapping, of a type that needs no scales. Null when they lie in no file.
std::unique_ptr<ExpertTensor> mapped_experts(const char * name, const ExpertTensor::Shape & shape, const uint8_t * data) {
    const MappedFile file = mapping_around(data);
    if (!file.base) return nullptr;
    const uint64_t expert_bytes = uint64_t(shape.n_rows) * shape.row_bytes;
    std::vector<const uint8_t *> of_expert;
    for (int64_t i = 0; i < shape.n_expert; i++) of_expert.push_back(data + uint64_t(i) * expert_bytes);
    auto experts = std::make_unique<ExpertTensor>(name, shape, std::move(of_expert), BlockScales{}, nullptr);
    experts->set_origin({piece_of(file, data, uint64_t(shape.n_expert) * expert_bytes)});
    return experts;
}

// Memory for copies that devices read at full speed, or ordinary memory.
std::unique_ptr<Arena> pinned_or_not(size_t n_bytes, int node) {
    std::string why;
    auto arena = pinned_arena(Streams::get().gpus(), n_bytes, node, settings().pinned_bytes, why);
    if (arena) return arena;
    note_trouble("pinning", "experts_memory=pinned: " + why + "; experts are copied to ordinary memory and staged from there");
    return std::make_unique<Arena>(n_bytes, node);
}

// The range of the host's mapping, pinned where it lies.
bool pin_mapping(const ggml_tensor * tensor, ExpertTensor & experts) {
    std::string why;
    auto pins = pin_in_place(Streams::get().gpus(), tensor->data, host().ggml_nbytes(tensor), true, settings().pinned_bytes, why);
    if (pins) experts.hold(std::move(pins));
    return bool(experts.is_held());
}

// experts_memory=copy or pinned: `experts` (null: none are known behind the tensor yet) are copied at their first use, if
// they can be; what CUDA can pin in the host's mapping is not copied.
void keep_in_memory(const BufferContext & ctx, const ggml_tensor * tensor, std::unique_ptr<ExpertTensor> & experts, bool pinned) {
    ExpertTensor::Shape shape;
    uint8_t * data = static_cast<uint8_t *>(tensor->data);
    if (!is_expert_weight(tensor, shape)) return;
    if (ctx.owned && (!experts || experts->source(0) == data)) {
        // Nothing tells which file the host is reading from, so there is nothing to share and no second copy to make.
        spread_pages(data, uint64_t(shape.n_expert) * uint64_t(shape.n_rows) * shape.row_bytes);
        note_trouble("mmap off", "experts_memory=copy: the host reads this model's experts into memory itself (mmap is off): they are "
                                 "spread evenly over NUMA nodes, not placed by rows and not shared with other models; "
                                 "load with mmap on for that");
        return;
    }
    if (!experts) experts = mapped_experts(tensor->name, shape, data);
    if (experts && shape.type == WeightType::foreign) {
        pin_mapping(tensor, *experts);  // stock kernels read the mapping: a copy would be a second one
    } else if (!experts) {
        note_trouble("no file", "experts_memory=copy: the host's memory is of no file: experts stay where it put them");
    } else if (pinned && Streams::get().gpus().empty()) {
        note_trouble("pinning", "experts_memory=pinned: there is no device to pin experts for; they stay in their files (mmap)");
    } else if (!pinned) {
        experts->copy_to_memory();
    } else if (experts->source(0) != data || !pin_mapping(tensor, *experts)) {
        experts->copy_to_memory(pinned_or_not);
    }
}

void note_experts(ggml_backend_buffer_t buffer, const ggml_tensor * tensor) {
    context_of(buffer).has_experts = true;
    note_weight(tensor);
}

// Called for every tensor put into a buffer of ours, also for intermediate results.
ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    if (tensor->view_src) return GGML_STATUS_SUCCESS;
    try {
        std::unique_ptr<ExpertTensor> experts = experts_of(tensor);
        const bool is_weights = buffer->usage != GGML_BACKEND_BUFFER_USAGE_COMPUTE;
        const ExpertsMemory memory = experts_memory();
        if (is_weights && memory != ExpertsMemory::mmap) {
            keep_in_memory(context_of(buffer), tensor, experts, memory == ExpertsMemory::pinned);
        }
        ExpertTensor::Shape shape;
        const bool is_experts = is_weights && is_expert_weight(tensor, shape);
        if (!experts) {
            if (is_experts) note_experts(buffer, tensor);
            return GGML_STATUS_SUCCESS;
        }
        if (!matches(tensor, experts->shape())) {
            throw std::runtime_error(std::string("tensor '") + tensor->name + "' has another shape or type than its checkpoint");
        }
        tensor->extra = experts.get();
        context_of(buffer).aliases[tensor] = std::move(experts);
        if (is_experts) note_experts(buffer, tensor);
        return GGML_STATUS_SUCCESS;
    } catch (const std::exception & e) {
        return report_failure(e.what());
    }
}

// Before something writes to a tensor of this buffer: devices may have, or be reading, the experts that are there now.
void forget_experts_in(ggml_backend_buffer_t buffer, const ggml_tensor * tensor) {
    ExpertTensor::Shape shape;
    if (context_of(buffer).has_experts && is_expert_weight(tensor, shape)) Streams::get().forget();
}

// Whether the tensor's own memory is empty because its bytes lie in a checkpoint's files.
bool lies_elsewhere(const ggml_tensor * tensor) {
    const ExpertTensor * experts = experts_behind(tensor);
    return experts && experts->source(0) != tensor->data;
}

bool refuse_write(const ggml_tensor * tensor) {
    if (!lies_elsewhere(tensor) && !(experts_behind(tensor) && experts_behind(tensor)->is_copied())) return false;
    host().log(GGML_LOG_LEVEL_ERROR, "hybrid-moe: tensor '%s' lies in a checkpoint on disk and cannot be written\n",
               tensor->name);
    return true;
}

void memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    forget_experts_in(buffer, tensor);
    if (!refuse_write(tensor)) memset(static_cast<uint8_t *>(tensor->data) + offset, value, size);
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    forget_experts_in(buffer, tensor);
    if (!refuse_write(tensor)) memcpy(static_cast<uint8_t *>(tensor->data) + offset, data, size);
}

void get_tensor(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    if (!lies_elsewhere(tensor)) {
        memcpy(data, static_cast<const uint8_t *>(tensor->data) + offset, size);
        return;
    }
    const ExpertTensor * experts = experts_behind(tensor);
    const size_t expert_bytes = size_t(experts->shape().n_rows) * experts->shape().row_bytes;
    uint8_t * to = static_cast<uint8_t *>(data);
    while (size > 0) {
        const size_t within = offset % expert_bytes;
        const size_t n = size < expert_bytes - within ? size : expert_bytes - within;
        memcpy(to, experts->source(int64_t(offset / expert_bytes)) + within, n);
        to += n;
        offset += n;
        size -= n;
    }
}

bool cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst) {
    if (!src->buffer || !src->buffer->buft->iface.is_host || !src->buffer->buft->iface.is_host(src->buffer->buft)) {
        return false;
    }
    if (lies_elsewhere(src) || refuse_write(dst)) return false;
    forget_experts_in(buffer, dst);
    memcpy(dst->data, src->data, host().ggml_nbytes(src));
    return true;
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    BufferContext & ctx = context_of(buffer);
    if (ctx.has_experts) Streams::get().forget();
    if (ctx.owned && value == 0) {  // fresh anonymous pages are zero already; give used ones back instead of writing
        madvise(ctx.base, ctx.size, MADV_DONTNEED);
    } else {
        memset(ctx.base, value, ctx.size);
    }
}

const ggml_backend_buffer_i buffer_interface = {
    .free_buffer   = free_buffer,
    .get_base      = get_base,
    .init_tensor   = init_tensor,
    .memset_tensor = memset_tensor,
    .set_tensor    = set_tensor,
    .get_tensor    = get_tensor,
    .set_tensor_2d = nullptr,
    .get_tensor_2d = nullptr,
    .cpy_tensor    = cpy_tensor,
    .clear         = clear,
    .reset         = nullptr,
};

const char * buffer_type_name(ggml_backend_buffer_type_t) { return device_name; }

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    auto ctx = std::make_unique<BufferContext>();
    ctx->size  = size ? size : alignment;
    ctx->owned = true;
    // MAP_NORESERVE: the experts of a checkpoint are "allocated" here and never touched.
    void * p = mmap(nullptr, ctx->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        host().log(GGML_LOG_LEVEL_ERROR, "hybrid-moe: %zu MiB of address space for a buffer cannot be had\n", size >> 20);
        return nullptr;
    }
    ctx->base = static_cast<uint8_t *>(p);
    return host().ggml_backend_buffer_init(buft, buffer_interface, ctx.release(), size);
}

size_t get_alignment(ggml_backend_buffer_type_t) { return alignment; }
bool is_host(ggml_backend_buffer_type_t) { return true; }

}  // namespace

ggml_backend_buffer_type_t buffer_type() {
    static ggml_backend_buffer_type type = {
        .iface = {
            .get_name       = buffer_type_name,
            .alloc_buffer   = alloc_buffer,
            .get_alignment  = get_alignment,
            .get_max_size   = nullptr,
            .get_alloc_size = nullptr,
            .is_host        = is_host,
        },
        .device  = device(),
        .context = nullptr,
    };
    return &type;
}

ggml_backend_buffer_t buffer_from_host_ptr(void * ptr, size_t size) {
    auto ctx = std::make_unique<BufferContext>();
    try {
        ctx->trailer = check_mapped_model(ptr);
    } catch (const std::exception & e) {
        report_failure(e.what());
        return nullptr;
    }
    ctx->base = static_cast<uint8_t *>(ptr);
    ctx->size = size;
    return host().ggml_backend_buffer_init(buffer_type(), buffer_interface, ctx.release(), size);
}

void pin_result(const ggml_tensor * tensor) {
    constexpr size_t worth_it = size_t(1) << 20;
    const ggml_tensor * whole = tensor->view_src ? tensor->view_src : tensor;
    const size_t n_bytes = host().ggml_nbytes(tensor);
    if (!is_our_buffer(whole->buffer) || n_bytes < worth_it) return;
    BufferContext & ctx = context_of(whole->buffer);
    const std::vector<Gpu> gpus = Streams::get().gpus();
    for (const Gpu & gpu : gpus) {
        if (gpu.family == "CUDA" && is_pinned_for(gpu, static_cast<uint8_t *>(tensor->data) + 8192, n_bytes - 16384) == Pinned::yes) return;
    }
    if (!ctx.owned || ctx.pins.size() >= 64) return;
    std::string why;  // it is only slower
    if (auto pin = pin_in_place(gpus, tensor->data, n_bytes, false, UINT64_MAX, why)) ctx.pins.push_back(std::move(pin));
}

bool is_our_buffer(ggml_backend_buffer_t buffer) { return buffer && buffer->buft == buffer_type(); }

ExpertTensor * experts_behind(const ggml_tensor * tensor) {
    return is_our_buffer(tensor->buffer) ? static_cast<ExpertTensor *>(tensor->extra) : nullptr;
}

bool weight_type_of(ggml_type type, WeightType & out) {
    switch (type) {
        case GGML_TYPE_F32:    out = WeightType::f32; return true;
        case GGML_TYPE_F16:    out = WeightType::f16; return true;
        case GGML_TYPE_BF16:   out = WeightType::bf16; return true;
        case GGML_TYPE_Q8_0:   out = WeightType::q8_0; return true;
        case GGML_TYPE_I8:     out = WeightType::fp8_e4m3; return true;
        case GGML_TYPE_Q4_0:   out = WeightType::q4_0; return true;
        case GGML_TYPE_Q4_K:   out = WeightType::q4_k; return true;
        case GGML_TYPE_Q5_K:   out = WeightType::q5_k; return true;
        case GGML_TYPE_Q6_K:   out = WeightType::q6_k; return true;
        case GGML_TYPE_IQ4_XS: out = WeightType::iq4_xs; return true;
        case GGML_TYPE_MXFP4:  out = WeightType::mxfp4; return true;
        case GGML_TYPE_NVFP4:  out = WeightType::nvfp4; return true;  // unknown to the oldest hosts: they have no such tensors
        default:               return false;
    }
}

}  // namespace hybrid_moe
