// FP8 for few token rows: the decode loop, bound by memory, written once over a few more words of the vocabulary.
//
// Vec: fp8_group codes are decoded at a time, into fp8_parts registers (Fp8, fp8_decode). What they are multiplied with
// is stored per group in fp8_x_bytes bytes, in the decoder's order: fp8_store_x(x, scale, out) does that for the group of
// activations x, times scale. fp8_multiply(part, x, acc) adds the products of one part; sums are then times fp8_y_unit.
// fp8_rows: weight rows at once for one token row, as many streams from memory. Include after body.h.
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

// Pieces of n columns of R weight rows times M token rows, to out[R][M]. Row r begins at w + r x row_bytes, and the same
// piece of the row `ahead` bytes further is fetched. x: M stored pieces, x_stride bytes apart.
template <int R, int M>
inline void rows_piece(const uint8_t * w, size_t row_bytes, size_t ahead, const uint8_t * x, int64_t x_stride, int64_t n, float * out) {
    constexpr int P = Vec::fp8_parts;
    constexpr int C = R * M <= 2 ? P : 2;  // chains per sum, to hide the latency of the multiply-add
    Vec acc[R * M * C];
    for (int a = 0; a < R * M * C; a++) acc[a] = Vec::zero();
    const auto multiply_group = [&](int r, const uint8_t * codes, const uint8_t * x_group) {
        const typename Vec::Fp8 f = Vec::fp8_decode(codes);
        for (int j = 0; j < M; j++) {
            for (int q = 0; q < P; q++) {
                Vec & sum = acc[(r * M + j) * C + q % C];
                sum = Vec::fp8_multiply(f.part[q], x_group + j * x_stride + q * (Vec::fp8_x_bytes / P), sum);
            }
        }
    };
    constexpr int64_t step = group < 64 ? 64 : group;  // a cache line
    int64_t i = 0;
    for (; i + step <= n; i += step) {
        HYBRID_MOE_LOOP_BEGIN(M);
        for (int r = 0; r < R; r++) {
            const uint8_t * line = w + size_t(r) * row_bytes + i;
            __builtin_prefetch(line + ahead);
            for (int64_t g = 0; g < step; g += group) multiply_group(r, line + g, x + g / group * Vec::fp8_x_bytes);
        }
        x += step / group * Vec::fp8_x_bytes;
        HYBRID_MOE_LOOP_END;
    }
    for (; i < n; i += group, x += Vec::fp8_x_bytes) {
        for (int r = 0; r < R; r++) multiply_group(r, w + size_t(r) * row_bytes + i, x);
    }
    Vec total[R * M];
    for (int j = 0; j < R * M; j++) {
        total[j] = acc[j * C];
        for (int c = 1; c < C; c++) total[j] = Vec::add(total[j], acc[j * C + c]);
    }
    sums<R * M>(total, out);
    for (int j = 0; j < R * M; j++) out[j] *= Vec::fp8_y_unit;
}

// Scales by output channel: one block of columns, one row per block. They multiply the sums instead of the activations.
inline bool by_channel(const ExpertMatrix & e) { return e.block_rows == 1 && e.n_k_blocks() == 1; }

// Activations are scaled once per block of rows: with very low blocks that would cost more than it saves.
constexpr int64_t min_block_rows = 16;

inline bool suits(const ExpertMatrix & e) { return e.block_rows >= min_block_rows || by_channel(e); }

template <int R, int M>
inline void rows_to_y(const ExpertMatrix & e, int64_t r, int64_t i0, int64_t n, const uint8_t * stored, int64_t x_stride, float * const * y) {
    float out[R * M];
    const size_t ahead = r + 2 * R <= e.n_rows ? R * e.row_bytes : 0;
    rows_piece<R, M>(e.row(r) + i0, e.row_bytes, ahead, stored, x_stride, n, out);
    for (int k = 0; k < R; k++) {
        for (int j = 0; j < M; j++) y[j][r + k] = i0 == 0 ? out[k * M + j] : y[j][r + k] + out[k * M + j];
    }
}

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
        constexpr int R = M == 1 ? Vec::fp8_rows : 1;  // with more token rows, memory is not the limit
        for (; r + R <= end; r += R) rows_to_y<R, M>(e, r, i0, n, stored, x_stride, y);
        for (; r < end; r++) rows_to_y<1, M>(e, r, i0, n, stored, x_stride, y);
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
