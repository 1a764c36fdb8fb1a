// C functions for the Python package: thin, exceptions become sentences.
#include "plugin/api.h"

#include "checkpoint/expert_table.h"
#include "cuda/kernel_image.h"
#include "kernels/measure.h"
#include "moe/expert_matmul.h"
#include "moe/pretend_cpu.h"
#include "plugin/device.h"
#include "plugin/host.h"
#include "plugin/settings.h"
#include "stream/recorder.h"
#include "stream/streams.h"
#include "threads/measure_team.h"
#include "threads/team.h"
#include "threads/topology.h"

#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <vector>

namespace hybrid_moe {
const std::string & refusal_sentence();
}

using namespace hybrid_moe;

struct hybrid_moe_table {
    explicit hybrid_moe_table(bool copied) : table(std::make_shared<ExpertTable>(copied)) {}
    std::shared_ptr<ExpertTable> table;
};

namespace {

thread_local std::string error_sentence;

int fail(const std::string & sentence) {
    error_sentence = sentence;
    return -1;
}

// Runs f; an exception becomes -1 and a sentence.
template <class F> int guarded(F f) {
    try {
        return f();
    } catch (const std::exception & e) {
        return fail(e.what());
    }
}

std::vector<FileRange> ranges(int64_t n, const int32_t * file, const uint64_t * offset) {
    std::vector<FileRange> out;
    for (int64_t i = 0; file && i < n; i++) out.push_back({file[i], offset[i]});
    return out;
}

bool parse_mask(const char * cpus, std::vector<int> & out) {
    return (cpus && parse_cpu_list(cpus, out)) || fail("the affinity mask must be a list such as 0-3,8") == 0;
}

const Kernels * kernels_named(const char * isa) {
    char text[256];
    const Kernels * k = select_kernels(isa, text, sizeof text);
    if (!k) fail(text);
    return k;
}

bool to_matrix(const hybrid_moe_matrix & in, ExpertMatrix & out) {
    if (in.type < 0 || in.type >= n_weight_types) return false;
    const WeightType type = WeightType(in.type);
    if (in.n_rows < 0 || in.k < 0 || in.k % group_len(type) != 0) return false;
    if (type == WeightType::fp8_e4m3 && (!in.scales || in.block_rows < 1 || in.block_k < 1)) return false;
    out = {type,      in.codes,  size_t(in.k / group_len(type)) * group_bytes(type), in.n_rows, in.k,
           in.scales, in.block_rows, in.block_k};
    return true;
}

}  // namespace

const char * hybrid_moe_error(void) { return error_sentence.c_str(); }
const char * hybrid_moe_refusal(void) { return refusal_sentence().c_str(); }
const char * hybrid_moe_take_failure(void) {
    thread_local std::string sentence;
    sentence = take_failure();
    return sentence.c_str();
}

const char * hybrid_moe_isa(void) { return settings().kernels ? settings().kernels->name : ""; }
const char * hybrid_moe_team(void) { return settings().kernels ? team_provider() : ""; }
const char * hybrid_moe_pin(void) { return settings().kernels ? team_pin_mode() : ""; }

const char * hybrid_moe_available_isas(void) {
    static const std::string names = [] {
        std::string s;
        size_t n;
        const Implementation * all = implementations(&n);
        for (size_t i = 0; i < n; i++) {
            if (all[i].runs_here()) s += (s.empty() ? "" : " ") + std::string(all[i].kernels->name);
        }
        return s;
    }();
    return names.c_str();
}

void hybrid_moe_counters(uint64_t out[6]) {
    const Counters c = counters();
    out[0] = c.n_matmuls;
    out[1] = c.n_rows;
    out[2] = c.weight_bytes;
    out[3] = c.n_dot_experts;
    out[4] = c.n_gemm_experts;
    out[5] = c.n_layers;
}

const char * hybrid_moe_machine(const char * sys_root, const char * proc_root, const char * cpus) {
    thread_local std::string described;
    if (!sys_root || !proc_root) {
        described = machine().describe();
        return described.c_str();
    }
    std::vector<int> allowed;
    if (!parse_mask(cpus, allowed)) return nullptr;
    described = read_machine(sys_root, proc_root, allowed).describe();
    return described.c_str();
}

int hybrid_moe_pretend_machine(const char * sys_root, const char * proc_root, const char * cpus) {
    std::vector<int> allowed;
    if (!parse_mask(cpus, allowed)) return -1;
    pretend_machine(read_machine(sys_root, proc_root, allowed));
    return 0;
}

int hybrid_moe_choose_experts_memory(const char * name) {
    return choose_experts_memory(name) ? 0 : fail(std::string("experts_memory=") + name + ": choose mmap, copy or pinned");
}

const char * hybrid_moe_stream_report(void) {
    static thread_local std::string text;
    text = Streams::get().report();
    return text.c_str();
}

void hybrid_moe_record(int64_t min_tokens) { record_from(min_tokens < 0 ? 0 : min_tokens); }

const char * hybrid_moe_recorded(int of_layers, int64_t begin_ns, int64_t end_ns) {
    thread_local std::string text;
    text = recorded(of_layers != 0, begin_ns, end_ns);
    return text.c_str();
}

int hybrid_moe_stream_allow(const char * devices, int cpu_may_help) {
    return guarded([&] {
        const std::vector<std::string> names = split_names(devices ? devices : "");
        std::string why;
        return Streams::get().allow(devices ? &names : nullptr, cpu_may_help != 0, why) ? 0 : fail(why);
    });
}

void hybrid_moe_stream_first(int is_first) { this_thread_is_first() = is_first != 0; }
void hybrid_moe_pretend_cpu(int64_t (*charge)(int64_t, size_t, double)) { pretend_cpu(charge); }

const char * hybrid_moe_copies(void) {
    thread_local std::string described;
    described = describe_copies(false);
    return described.c_str();
}

hybrid_moe_table * hybrid_moe_table_new(int copied) { return new hybrid_moe_table(copied != 0); }

int hybrid_moe_table_add_file(hybrid_moe_table * table, const char * path) {
    return guarded([&] { return table->table->add_file(path); });
}

int hybrid_moe_table_add_tensor(hybrid_moe_table * table, const hybrid_moe_expert_tensor * t) {
    return guarded([&] {
        if (t->type < 0 || t->type >= n_weight_types) return fail("tensor '" + std::string(t->name) + "': unknown type");
        const WeightType type = WeightType(t->type);
        if (t->k % group_len(type) != 0) return fail("tensor '" + std::string(t->name) + "': ragged rows");
        const ExpertTensor::Shape shape = {type, t->n_expert, t->n_rows, t->k,
                                           size_t(t->k / group_len(type)) * group_bytes(type)};
        table->table->add_tensor(t->name, shape, ranges(t->n_expert, t->code_file, t->code_offset),
                                 ScaleType(t->scale_type), t->block_rows, t->block_k,
                                 ranges(t->n_expert, t->scale_file, t->scale_offset));
        return 0;
    });
}

void hybrid_moe_load_begin(hybrid_moe_table * table) { ExpertTable::loading() = table->table; }

int hybrid_moe_load_end(void) {
    const std::shared_ptr<ExpertTable> table = std::move(ExpertTable::loading());
    ExpertTable::loading().reset();
    return table ? table->n_bound() : 0;
}

void hybrid_moe_table_free(hybrid_moe_table * table) { delete table; }

int hybrid_moe_matmul(const char * isa, int kernel, const hybrid_moe_matrix * matrix, int64_t m, const float * x,
                      float * y) {
    return guarded([&] {
        ExpertMatrix e;
        const Kernels * k = kernels_named(isa);
        if (!k) return -1;
        if (!to_matrix(*matrix, e) || m < 0) return fail("the matrix's type, shape or scales make no sense");
        std::vector<const float *> xs;
        std::vector<float *> ys;
        for (int64_t j = 0; j < m; j++) {
            xs.push_back(x + j * e.k);
            ys.push_back(y + j * e.n_rows);
        }
        const TokenRows rows = {xs.data(), ys.data(), m};
        if (kernel == 0) {
            k->dot(e, 0, e.n_rows, rows);
        } else {
            std::unique_ptr<float, void (*)(void *)> scratch(static_cast<float *>(aligned_alloc(64, gemm_scratch_bytes)), free);
            k->gemm(e, 0, e.n_rows, rows, scratch.get());
        }
        return 0;
    });
}

int hybrid_moe_expand(const char * isa, const hybrid_moe_matrix * matrix, float * out) {
    ExpertMatrix e;
    const Kernels * k = kernels_named(isa);
    if (!k) return -1;
    if (!to_matrix(*matrix, e)) return fail("the matrix's type, shape or scales make no sense");
    for (int64_t r = 0; r < e.n_rows; r++) k->expand(e, r, 0, e.k, out + r * e.k);
    return 0;
}

int hybrid_moe_has_nan(const char * isa, const uint8_t * codes, size_t n) {
    const Kernels * k = kernels_named(isa);
    return k ? k->has_fp8_nan(codes, n) : -1;
}

double hybrid_moe_measure_read(int n_threads, size_t bytes, int repeats) { return measure_read(n_threads, bytes, repeats); }

double hybrid_moe_measure_fma(int n_threads, int repeats) {
    const Kernels * k = settings().kernels ? settings().kernels : kernels_named(nullptr);
    return measure_fma(*k, n_threads, repeats);
}

int hybrid_moe_measure_team(const char * provider, int n_threads, double gap_us, int host_works, double work_us, int rounds, double * out) {
    const std::string before = team_provider();
    if (!choose_team_provider(provider)) return fail(std::string("no team called ") + provider + " in this process");
    const bool could = measure_team(n_threads, gap_us, host_works != 0, work_us, rounds, out);
    choose_team_provider(before.c_str());
    return could ? 0 : fail("the host has no OpenMP team in this process");
}

const char * hybrid_moe_cuda_kernels(void) { return kernel_image().architectures; }

const char * hybrid_moe_judge_version(const char * version) {
    thread_local std::string verdict;
    verdict = judge_host_version(version, false);
    return verdict.c_str();
}
