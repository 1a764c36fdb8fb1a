// FP8 for few token rows: the decode loop, bound by memory, written once over a few more words of the vocabulary.
//
// Vec: fp8_group codes are decoded at a time, into fp8_parts registers (Fp8, fp8_decode). What they are multiplied with
// is stored per group in fp8_x_bytes bytes, in the decoder's order: fp8_store_x(x, scale, out) does that for the group of
// activations x, times scale. fp8_multiply(part, x, acc) adds the products of one part; sums are then times fp8_y_unit.
// Include after body.h.
//
// Columns go in chunks whose activations stay in L1, rows follow one another inside a chunk, and the next row's piece
// is prefetched while this one is multiplied. Activations carry their block's scale, so that the loop over a row is
// nothing but decode and multiply. Order of additions: chain c of a row takes part c of every group; chains, then lanes,
// then chunks are added.

// Marks the loop for static analysis (llvm-mca): compile a kernel file to assembly with -DHYBRID_MOE_MCA.
#ifdef HYBRID_MOE_MCA
#define HYBRID_MOE_LOOP_BEGIN(m) asm volatile("# LLVM-MCA-BEGIN fp8-%c0-token-rows" ::"i"(m))
#define HYBRID_MOE_LOOP_END asm volatile("# LLVM-MCA-END")
#else
#define HYBRID_MOE_LOOP_BEGIN(m)
#define HYBRID_MOE_LOOP_END
#endif

namespace {
namespace fp8 {

constexpr int64_t group = Vec::fp8_group;
constexpr int64_t chunk_floats = 4096;

// Activations of columns [i0, i0 + n) times scale[column / block_k], or times 1 when it is null, as the loop wants them.
// block_k is a multiple of group.
inline void store(const float * x, const float * scale, int64_t block_k, int64_t i0, int64_t n, uint8_t * out) {
    for (int64_t i = 0; i < n; i += group, out += Vec::fp8_x_bytes) {
        Vec::fp8_store_x(x + i0 + i, scale ? scale[(i0 + i) / block_k] : 1.0f, out);
    }
}

// The same for a block_k of any size.
inline void store_by_column(const float * x, const float * scale, int64_t block_k, int64_t i0, int64_t n, uint8_t * out) {
    for (int64_t i = 0; i < n; i += group, out += Vec::fp8_x_bytes) {
        float scaled[group];
        for (int64_t g = 0; g < group; g++) scaled[g] = x[i0 + i + g] * scale[(i0 + i + g) / block_k];
        Vec::fp8_store_x(scaled, 1.0f, out);
    }
}

// One weight row's piece of n columns times M token rows; x: M stored pieces, x_stride bytes apart.
template <int M>
inline void row_piece(const uint8_t * w, const uint8_t * next, const uint8_t * x, int64_t x_stride, int64_t n, float * out) {
    constexpr int P = Vec::fp8_parts;
    constexpr int C = M <= 2 ? P : 2;  // chains per token row, to hide the latency of the multiply-add
    Vec acc[M * C];
    for (int a = 0; a < M * C; a++) acc[a] = Vec::zero();
    const auto multiply_group = [&](const uint8_t * codes) {
        const typename Vec::Fp8 f = Vec::fp8_decode(codes);
        for (int j = 0; j < M; j++) {
            for (int q = 0; q < P; q++) {
                acc[j * C + q % C] = Vec::fp8_multiply(f.part[q], x + j * x_stride + q * (Vec::fp8_x_bytes / P), acc[j * C + q % C]);
            }
        }
        x += Vec::fp8_x_bytes;
    };
    constexpr int64_t step = group < 64 ? 64 : group;  // a cache line
    int64_t i = 0;
    for (; i + step <= n; i += step) {
        HYBRID_MOE_LOOP_BEGIN(M);
        __builtin_prefetch(next + i);
        for (int64_t g = 0; g < step; g += group) multiply_group(w + i + g);
        HYBRID_MOE_LOOP_END;
    }
    for (; i < n; i += group) multiply_group(w + i);
    Vec row[M];
    for (int j = 0; j < M; j++) {
        row[j] = acc[j * C];
        for (int c = 1; c < C; c++) row[j] = Vec::add(row[j], acc[j * C + c]);
    }
    sums<M>(row, out);
    for (int j = 0; j < M; j++) out[j] *= Vec::fp8_y_unit;
}

// Scales by output channel: one block of columns, one row per block. They multiply the sums instead of the activations.
inline bool by_channel(const ExpertMatrix & e) { return e.block_rows == 1 && e.n_k_blocks() == 1; }

// Activations are scaled once per block of rows: with very low blocks that would cost more than it saves.
constexpr int64_t min_block_rows = 16;

inline bool suits(const ExpertMatrix & e) { return e.block_rows >= min_block_rows || by_channel(e); }

// Columns [i0, i0 + n) of rows [row0, row1): adds to y, or sets it for the first columns.
template <int M>
void chunk_of_rows(const ExpertMatrix & e, int64_t row0, int64_t row1, int64_t i0, int64_t n, const float * const * x,
                   float * const * y) {
    alignas(64) uint8_t stored[chunk_floats * sizeof(float)];
    const int64_t x_stride = n / group * Vec::fp8_x_bytes;
    const bool whole_groups = by_channel(e) || e.block_k % group == 0;
    const int64_t block_rows = by_channel(e) ? e.n_rows : e.block_rows;
    for (int64_t r = row0; r < row1;) {
        const int64_t end = min_i64((r / block_rows + 1) * block_rows, row1);
        const float * scale = by_channel(e) ? nullptr : e.row_scale(r);
        for (int j = 0; j < M; j++) {
            (whole_groups ? store : store_by_column)(x[j], scale, e.block_k, i0, n, stored + j * x_stride);
        }
        for (; r < end; r++) {
            const uint8_t * w = e.row(r) + i0;
            float out[M];
            row_piece<M>(w, r + 1 < e.n_rows ? w + e.row_bytes : w, stored, x_stride, n, out);
            for (int j = 0; j < M; j++) y[j][r] = i0 == 0 ? out[j] : y[j][r] + out[j];
        }
    }
}

template <int M>
void all_rows(const ExpertMatrix & e, int64_t row0, int64_t row1, const float * const * x, float * const * y) {
    constexpr int64_t chunk = chunk_floats / M / group * group;
    const int64_t whole = e.k / group * group;
    for (int64_t i0 = 0; i0 == 0 || i0 < whole; i0 += chunk) {
        chunk_of_rows<M>(e, row0, row1, i0, min_i64(chunk, whole - i0), x, y);
    }
    for (int64_t r = row0; r < row1; r++) {
        const float * scale = by_channel(e) ? nullptr : e.row_scale(r);
        for (int64_t i = whole; i < e.k; i++) {
            const float w = f32_of_fp8(e.row(r)[i]) * (scale ? scale[i / e.block_k] : 1.0f);
            for (int j = 0; j < M; j++) y[j][r] += w * x[j][i];
        }
        for (int j = 0; by_channel(e) && j < M; j++) y[j][r] *= e.scale[r];
    }
}

void dot(const ExpertMatrix & e, int64_t row0, int64_t row1, const TokenRows & t) {
    const Vec::Environment environment;
    int64_t j = 0;
    for (; j + 4 <= t.m; j += 4) all_rows<4>(e, row0, row1, t.x + j, t.y + j);
    if (t.m - j == 3) all_rows<3>(e, row0, row1, t.x + j, t.y + j);
    if (t.m - j == 2) all_rows<2>(e, row0, row1, t.x + j, t.y + j);
    if (t.m - j == 1) all_rows<1>(e, row0, row1, t.x + j, t.y + j);
}

}  // namespace fp8

// FP8 by the loop above where it suits, everything else by the loops of body.h.
void dot_any(const ExpertMatrix & e, int64_t row0, int64_t row1, const TokenRows & t) {
    if (e.type == WeightType::fp8_e4m3 && fp8::suits(e)) {
        fp8::dot(e, row0, row1, t);
    } else {
        dot(e, row0, row1, t);
    }
}

}  // namespace
