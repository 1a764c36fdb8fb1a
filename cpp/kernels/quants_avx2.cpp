// Products of quantised weights and token rows on AVX2, by integer sums of int8 activations: one loop from one token row to
// thousands. Eight token rows at a time share the decoding of a weight, which then costs less than a float multiply-add per
// weight, so that no panel of expanded weights is needed.
#include "quants_products_avx2.h"

namespace hybrid_moe {
namespace {

constexpr int group_rows = 8;   // token rows that share the decoding
constexpr int batch_rows = 32;  // token rows that share a pass over the weights
constexpr int x_bytes    = 320;  // of 256 rounded activations: those of both kinds take as much

// Columns whose activations are rounded at once, in steps of 256. One or two token rows: nearly every model's rows fit,
// and reading memory in one stream matters most (with chunks of 4096 columns one row of 7168 takes 1.4x the time). More: the
// activations of a group stay in L1, those of a batch in L2 beside a tile of weights.
constexpr int chunk_steps(int m) { return m <= 2 ? 32 : m <= 4 ? 16 : 8; }
constexpr int     most_x     = batch_rows * chunk_steps(batch_rows);
constexpr int64_t tile_bytes = 256 * 1024;

// How far ahead of the multiplication weights are fetched. 2 KiB: without, 1.2x the time; 1 KiB and a whole row are
// not better.
constexpr int prefetch_bytes = 2048;

// One weight row's piece times M token rows; x: [n_steps][M]. `gap`: bytes between its end and the next row's piece.
// `rest` columns after the last whole step are multiplied in a copy that zeros complete: their scales are 0 there.
template <class Q, int M>
inline void row_piece(const uint8_t * w, ptrdiff_t gap, const typename Q::X * x, int n_steps, int rest, float * out) {
    constexpr int C = chains<M>;
    __m256 acc[M * C];
    for (__m256 & a : acc) a = _mm256_setzero_ps();
    const int bytes = n_steps * Q::step_bytes;
    const int distance = bytes < prefetch_bytes ? bytes : prefetch_bytes;
    const uint8_t * last_inside = w + bytes - distance;
    for (int s = 0; s < n_steps; s++, w += Q::step_bytes, x += M) {
        const uint8_t * ahead = w + distance + (w < last_inside ? 0 : gap);
        for (int i = 0; i < Q::step_bytes; i += 64) __builtin_prefetch(ahead + i);
        Q::template multiply<M>(w, x, acc);
    }
    if (Q::block_len < 256 && rest > 0) {
        uint8_t padded[Q::step_bytes] = {};
        __builtin_memcpy(padded, w, size_t(rest / Q::block_len) * (Q::step_bytes * Q::block_len / 256));
        Q::template multiply<M>(padded, x, acc);
    }
    for (int j = 0; C == 2 && j < M; j++) acc[j] = _mm256_add_ps(acc[2 * j], acc[2 * j + 1]);
    int j = 0;
    for (; j + 4 <= M; j += 4) _mm_storeu_ps(out + j, sums_of(acc[j], acc[j + 1], acc[j + 2], acc[j + 3]));
    for (; j < M; j++) out[j] = sum_of(acc[j]);
}

// Columns [i0, i0 + n) of rows [row0, row1) times M token rows, rounded in x: adds to y, or sets it for the first columns.
template <class Q, int M>
void rows_times(const ExpertMatrix & e, int64_t row0, int64_t row1, int64_t i0, int n, const uint8_t * x, float * const * y) {
    const size_t offset = size_t(i0 / 256) * Q::step_bytes;
    const ptrdiff_t gap = ptrdiff_t(e.row_bytes) - n / 256 * Q::step_bytes;
    for (int64_t r = row0; r < row1; r++) {
        float out[M];
        row_piece<Q, M>(e.row(r) + offset, gap, reinterpret_cast<const typename Q::X *>(x), n / 256, n % 256, out);
        for (int j = 0; j < M; j++) y[j][r] = i0 == 0 ? out[j] : y[j][r] + out[j];
    }
}

// Columns [i0, i0 + n) of m token rows to [steps][m].
template <class X> void round_rows(const float * const * x, int m, int64_t i0, int n, uint8_t * out) {
    static_assert(sizeof(X) == x_bytes);
    X * to = reinterpret_cast<X *>(out);
    for (int i = 0; i < n; i += 256) {
        for (int j = 0; j < m; j++) (to++)->round(x[j] + i0 + i, n - i < 256 ? n - i : 256);
    }
}

// The loops of one weight type; multiply: by the number of token rows.
struct Loops {
    int step_bytes;
    void (*round)(const float * const * x, int m, int64_t i0, int n, uint8_t * out);
    void (*multiply[group_rows])(const ExpertMatrix & e, int64_t row0, int64_t row1, int64_t i0, int n, const uint8_t * x, float * const * y);
};

template <class Q> constexpr Loops loops_of() {
    return {Q::step_bytes, round_rows<typename Q::X>,
            {rows_times<Q, 1>, rows_times<Q, 2>, rows_times<Q, 3>, rows_times<Q, 4>, rows_times<Q, 5>, rows_times<Q, 6>,
             rows_times<Q, 7>, rows_times<Q, 8>}};
}

Loops loops_for(WeightType type) {
    switch (type) {
        case WeightType::q4_0:   return loops_of<By32<Q4_0>>();
        case WeightType::mxfp4:  return loops_of<By32<Mxfp4>>();
        case WeightType::nvfp4:  return loops_of<Nvfp4>();
        case WeightType::q4_k:   return loops_of<K45<false>>();
        case WeightType::q5_k:   return loops_of<K45<true>>();
        case WeightType::q6_k:   return loops_of<Q6_k>();
        case WeightType::iq4_xs: return loops_of<Iq4_xs>();
        default:                 return loops_of<By32<Q8_0>>();
    }
}

// Up to batch_rows token rows, in groups of nearly equal size.
void multiply_batch(const ExpertMatrix & e, int64_t row0, int64_t row1, int m, const float * const * x, float * const * y) {
    alignas(64) uint8_t rounded[most_x * x_bytes];
    const Loops loops = loops_for(e.type);
    const int n_groups = (m + group_rows - 1) / group_rows;
    const int64_t chunk = 256 * chunk_steps(m);
    const int64_t rows = n_groups == 1 ? row1 - row0 : tile_bytes * 256 / (chunk * loops.step_bytes);
    const auto begin = [=](int g) { return m * g / n_groups; };
    for (int64_t i0 = 0; i0 < e.k; i0 += chunk) {
        const int n = int(e.k - i0 < chunk ? e.k - i0 : chunk);
        const auto x_of = [&](int g) { return rounded + begin(g) * ((n + 255) / 256) * x_bytes; };
        for (int g = 0; g < n_groups; g++) loops.round(x + begin(g), begin(g + 1) - begin(g), i0, n, x_of(g));
        for (int64_t r = row0; r < row1; r += rows) {
            const int64_t end = r + rows < row1 ? r + rows : row1;
            for (int g = 0; g < n_groups; g++) {
                loops.multiply[begin(g + 1) - begin(g) - 1](e, r, end, i0, n, x_of(g), y + begin(g));
            }
        }
    }
}

// Whether a token row can be rounded to int8: all magnitudes below 2^22, so that F16 holds every block's scale.
bool can_be_rounded(const float * x, int64_t k) {
    const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
    __m256i largest = _mm256_setzero_si256();  // as integers: NaN and infinity are larger than any number
    for (int64_t i = 0; i < k; i += 8) largest = _mm256_max_epi32(largest, _mm256_and_si256(load32(x + i), magnitude));
    const __m256i too_large = _mm256_cmpgt_epi32(largest, _mm256_set1_epi32(0x4A7FFFFF));
    return _mm256_testz_si256(too_large, too_large);
}

// The exact product, for token rows that cannot be rounded. Slow.
void row_as_floats(const ExpertMatrix & e, int64_t row0, int64_t row1, const float * x, float * y) {
    float w[256];
    for (int64_t r = row0; r < row1; r++) {
        __m256 acc = _mm256_setzero_ps();
        for (int64_t i0 = 0; i0 < e.k; i0 += 256) {
            const int64_t n = e.k - i0 < 256 ? e.k - i0 : 256;
            expand_quants_avx2(e, r, i0, n, w);
            for (int64_t i = 0; i < n; i += 8) acc = _mm256_fmadd_ps(_mm256_loadu_ps(w + i), _mm256_loadu_ps(x + i0 + i), acc);
        }
        y[r] = sum_of(acc);
    }
}

}  // namespace

void multiply_quants_avx2(const ExpertMatrix & e, int64_t row0, int64_t row1, const TokenRows & t) {
    for (int64_t j = 0; j < t.m;) {
        const float * x[batch_rows];
        float * y[batch_rows];
        int m = 0;
        for (; j < t.m && m < batch_rows; j++) {
            if (e.k == 0 || !can_be_rounded(t.x[j], e.k)) {
                row_as_floats(e, row0, row1, t.x[j], t.y[j]);
            } else {
                x[m] = t.x[j];
                y[m++] = t.y[j];
            }
        }
        if (m > 0) multiply_batch(e, row0, row1, m, x, y);
    }
}

}  // namespace hybrid_moe
