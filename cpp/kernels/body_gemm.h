// Many token rows: weights are expanded once per block of token rows into a panel that lies k-major in L1, and
// multiplied from there by outer products: one vector of weight rows times one broadcast activation per multiply-add.
// Written once over a few more words of the vocabulary. Include after body.h.
//
// Vec: gemm_tokens (token rows of the micro-kernel: 2 gemm_tokens accumulators, 2 weights and a broadcast fit into the
// registers). Beside it, before this file: turn_floats(in, rows, n, out) sets out[n][rows] to in[rows][piece_k], n a multiple
// of 8; turn_codes<T>(e, row0, rows, i0, n, panel) makes a whole panel in a faster way, if there is one for this type and
// shape, else returns false.
//
// Order of additions: columns ascending inside a piece of piece_k columns, pieces ascending into y.

namespace {
namespace gemm_loops {

constexpr int64_t panel_width = 2 * Vec::width;  // weight rows of a panel
static_assert(gemm_panel_rows % panel_width == 0, "tiles are cut in whole panels");

// The scratch of one call, cut up. All of it stays in L2; panel and the activations of one micro-kernel in L1.
struct Scratch {
    float * panel;   // [piece_k][panel_width]: expanded weights
    float * rows;    // [panel_width][piece_k]: the same, before they are turned
    float * x;       // [pieces][m][piece_k]: activations, without the power-of-two strides that collide in a cache
};

inline Scratch cut(float * scratch) {
    constexpr int64_t panel_floats = gemm_panel_rows * piece_k;
    return {scratch, scratch + panel_floats, scratch + 2 * panel_floats};
}

// `rows` weight rows from row0, columns [i0, i0 + n), k-major; missing rows are zero.
template <WeightType T>
inline void fill_panel_by_rows(const ExpertMatrix & e, int64_t row0, int64_t rows, int64_t i0, int64_t n, const Scratch & s) {
    const int64_t n8 = (n + 7) / 8 * 8;
    for (int64_t r = 0; r < panel_width; r++) {
        float * out = s.rows + r * piece_k;
        if (r < rows) expand_typed<T>(e, row0 + r, i0, n, out);
        for (int64_t i = r < rows ? n : 0; i < n8; i++) out[i] = 0.0f;
    }
    turn_floats(s.rows, panel_width, n8, s.panel);
}

// Sums of M token rows with one panel. One member per token row, not an array: compilers keep those in registers.
template <int M> struct Sums {
    Vec        a = Vec::zero();
    Vec        b = Vec::zero();
    Sums<M - 1> others;

    void add_column(Vec w0, Vec w1, const float * x) {
        const Vec xv = Vec::set1(*x);
        a = Vec::fma(w0, xv, a);
        b = Vec::fma(w1, xv, b);
        others.add_column(w0, w1, x + piece_k);
    }
    // Stored to y for the first columns, else added; `rows` of the panel's rows exist.
    void finish(bool first, float * const * y, int64_t row0, int64_t rows) const {
        float * to = *y + row0;
        if (rows == panel_width) {
            (first ? a : Vec::add(Vec::load(to), a)).store(to);
            (first ? b : Vec::add(Vec::load(to + Vec::width), b)).store(to + Vec::width);
        } else {
            float out[panel_width];
            a.store(out);
            b.store(out + Vec::width);
            for (int64_t r = 0; r < rows; r++) to[r] = first ? out[r] : to[r] + out[r];
        }
        others.finish(first, y + 1, row0, rows);
    }
};

template <> struct Sums<0> {
    void add_column(Vec, Vec, const float *) {}
    void finish(bool, float * const *, int64_t, int64_t) const {}
};

// The codes of the next panel, which come from memory while this one is multiplied: their rows are a row of the matrix
// apart, so that the processor does not guess them. A tile of token rows fetches `rows` of them.
struct Ahead {
    const uint8_t * codes;
    size_t          row_bytes;
    int64_t         rows;
    int64_t         line_columns;  // columns multiplied for each cache line fetched

    Ahead part(int64_t i, int64_t n_parts) const {
        const int64_t r0 = rows * i / n_parts;
        return {codes + size_t(r0) * row_bytes, row_bytes, rows * (i + 1) / n_parts - r0, line_columns};
    }
};

inline Ahead ahead_of(const ExpertMatrix & e, int64_t row0, int64_t i0, int64_t n) {
    const int64_t group = group_len(e.type);
    const size_t bytes = group_bytes(e.type);
    const int64_t n_lines = int64_t(size_t(n / group) * bytes / 64) + 1;
    return {e.row(row0) + size_t(i0 / group) * bytes, e.row_bytes, panel_width, (n + n_lines - 1) / n_lines};
}

template <WeightType T>
inline void fill_panel(const ExpertMatrix & e, int64_t row0, int64_t rows, int64_t i0, int64_t n, const Scratch & s) {
    if (rows == panel_width && turn_codes<T>(e, row0, panel_width, i0, n, s.panel)) return;
    fill_panel_by_rows<T>(e, row0, rows, i0, n, s);
}

// n columns of one panel times M token rows.
template <int M>
__attribute__((noinline)) void multiply_panel(const float * panel, const float * x, int64_t n, bool first, float * const * y,
                                              int64_t row0, int64_t rows, const Ahead & ahead) {
    Sums<M> sums;
    for (int j = 0; j < M; j++) {
        __builtin_prefetch(y[j] + row0);
        __builtin_prefetch(y[j] + row0 + panel_width - 1);
    }
    const uint8_t * line = ahead.codes;
    for (int64_t i = 0; i < n; line += 64) {
        for (int64_t r = 0; r < ahead.rows; r++) __builtin_prefetch(line + size_t(r) * ahead.row_bytes, 0, 2);
        const int64_t end = min_i64(i + ahead.line_columns, n);
#pragma GCC unroll 4
        for (; i < end; i++) {
            sums.add_column(Vec::load(panel + i * panel_width), Vec::load(panel + i * panel_width + Vec::width), x + i);
        }
    }
    sums.finish(first, y, row0, rows);
}

template <int M>
inline void multiply_panel_by(int64_t m, const float * panel, const float * x, int64_t n, bool first, float * const * y,
                              int64_t row0, int64_t rows, const Ahead & ahead) {
    if (m == M) return multiply_panel<M>(panel, x, n, first, y, row0, rows, ahead);
    if constexpr (M > 1) multiply_panel_by<M - 1>(m, panel, x, n, first, y, row0, rows, ahead);
}

// m token rows in tiles that differ by one at most: a last tile of one or two rows would run at half speed.
inline void all_tokens(const float * panel, const float * x, int64_t m, int64_t n, bool first, float * const * y, int64_t row0,
                       int64_t rows, const Ahead & ahead) {
    const int64_t n_tiles = (m + Vec::gemm_tokens - 1) / Vec::gemm_tokens;
    for (int64_t i = 0, j = 0; i < n_tiles; i++) {
        const int64_t tile = m / n_tiles + (i < m % n_tiles);
        multiply_panel_by<Vec::gemm_tokens>(tile, panel, x + j * piece_k, n, first, y + j, row0, rows, ahead.part(i, n_tiles));
        j += tile;
    }
}

// Columns [s0, s1) of all rows for one block of token rows.
template <WeightType T>
void slab(const ExpertMatrix & e, int64_t row0, int64_t row1, int64_t s0, int64_t s1, const float * const * x, float * const * y,
          int64_t m, const Scratch & s) {
    for (int64_t i0 = s0; i0 < s1; i0 += piece_k) {
        const size_t bytes = size_t(min_i64(piece_k, s1 - i0)) * sizeof(float);
        for (int64_t j = 0; j < m; j++) __builtin_memcpy(s.x + ((i0 - s0) * m) + j * piece_k, x[j] + i0, bytes);
    }
    for (int64_t r0 = row0; r0 < row1; r0 += panel_width) {
        const int64_t rows = min_i64(panel_width, row1 - r0);
        for (int64_t i0 = s0; i0 < s1; i0 += piece_k) {
            const int64_t n = min_i64(piece_k, s1 - i0);
            const bool same_rows = i0 + piece_k < s1;
            const Ahead ahead = same_rows ? ahead_of(e, r0, i0 + piece_k, n) : ahead_of(e, r0 + panel_width, s0, n);
            fill_panel<T>(e, r0, rows, i0, n, s);
            all_tokens(s.panel, s.x + (i0 - s0) * m, m, n, i0 == 0, y, r0, rows, ahead);
        }
    }
}

template <WeightType T>
void run(const ExpertMatrix & e, int64_t row0, int64_t row1, const TokenRows & t, float * scratch) {
    const Scratch s = cut(scratch);
    const int64_t n_blocks = (t.m + gemm_block_tokens - 1) / gemm_block_tokens;
    for (int64_t b = 0; b < n_blocks; b++) {
        const int64_t t0 = t.m * b / n_blocks;
        const int64_t m = t.m * (b + 1) / n_blocks - t0;
        // As many columns as fit: with few token rows all of them, so that the weights are read in sequence.
        const int64_t slab_k = gemm_block_tokens / m * piece_k;
        for (int64_t s0 = 0; s0 < e.k; s0 += slab_k) {
            slab<T>(e, row0, row1, s0, min_i64(s0 + slab_k, e.k), t.x + t0, t.y + t0, m, s);
        }
    }
}

}  // namespace gemm_loops

struct GemmCall {
    const ExpertMatrix & e; int64_t row0, row1; const TokenRows & t; float * scratch;
    template <WeightType T> void run() const { gemm_loops::run<T>(e, row0, row1, t, scratch); }
};

void gemm(const ExpertMatrix & e, int64_t row0, int64_t row1, const TokenRows & t, float * scratch) {
    const Vec::Environment environment;
    with_type(e.type, GemmCall{e, row0, row1, t, scratch});
}

}  // namespace
