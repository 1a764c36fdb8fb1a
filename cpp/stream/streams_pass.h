// One pass of tokens through one layer, while Streams decides and runs it. For layer_passes.cpp, streams.cpp and decide.cpp only.
#pragma once

#include "stream/streams.h"

namespace hybrid_moe {

// Below, calibrating would cost more than streaming could ever win.
constexpr int64_t min_automatic_tokens = 64;

struct Streams::Pass {
    const MoeLayer &                            layer;
    const std::shared_ptr<const LayerExperts> & experts;
    const RunOptions &                          options;
    Workspace &                                 work;
    Routing &                                   route;
    const DeviceInput *                         x;
    std::vector<size_t>                         devices;  // that take part
    bool                                        cpu_may_help = true;
};

// Threads that help with a streamed layer: a core per device stays free for its uploads and submissions.
inline int helping_threads(int n_threads, size_t n_devices) {
    const int n = n_threads - int(n_devices);
    return n < 1 ? 1 : n;
}

inline BatchShape shape_of(const MoeLayer & layer, int64_t n_tokens, int64_t tile_rows, int64_t n_index) {
    BatchShape s;
    s.n_embd_in  = layer.up.weights.shape.k;
    s.n_embd_out = layer.n_embd();
    s.n_ff       = layer.n_ff();
    s.n_x_rows   = n_tokens * layer.n_x_slots;
    s.n_tokens   = n_tokens;
    s.n_index    = n_index;
    s.tile_rows  = tile_rows;
    s.n_bias_experts = layer.gate.bias.data || layer.up.bias.data || layer.down.bias.data ? layer.down.weights.shape.n_expert : 0;
    return s;
}

}  // namespace hybrid_moe
