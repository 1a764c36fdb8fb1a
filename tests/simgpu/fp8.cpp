// E4M3 codes with block scales -> BF16 on the device: what a GPU with a kernel for it offers (cpp/stream/fp8_expander.h).
#include "fp8.h"

#include "clock.h"
#include "memory.h"

#include <cmath>
#include <cstring>

namespace simgpu {
namespace {

// OCP E4M3FN: sign, four bits of exponent (bias 7), three of mantissa; 0x7F is NaN.
float value_of(uint8_t code) {
    const int exponent = code >> 3 & 15;
    const int mantissa = code & 7;
    if ((code & 0x7F) == 0x7F) return NAN;
    const float v = exponent ? std::ldexp(float(8 + mantissa), exponent - 10) : std::ldexp(float(mantissa), -9);
    return code & 0x80 ? -v : v;
}

uint16_t rounded(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if (f != f) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

template <class T> T * bytes_of(const ggml_tensor * t) { return reinterpret_cast<T *>(backing(buffer_of(t), t->data)); }

void expand(const ggml_tensor * codes, const ggml_tensor * scales, ggml_tensor * out, int64_t block_rows, int64_t block_k) {
    const int64_t k = codes->ne[0];
    const int64_t n_blocks = (k + block_k - 1) / block_k;
    const uint8_t * from = bytes_of<uint8_t>(codes);
    const float * scale = bytes_of<float>(scales);
    uint16_t * to = bytes_of<uint16_t>(out);
    for (int64_t row = 0; row < codes->ne[1]; row++) {
        for (int64_t i = 0; i < k; i++) {
            to[row * k + i] = rounded(value_of(from[row * k + i]) * scale[row / block_rows * n_blocks + i / block_k]);
        }
    }
}

}  // namespace
}  // namespace simgpu

using namespace simgpu;

int simgpu_expand_fp8(const ggml_tensor * codes, const ggml_tensor * scales, ggml_tensor * out, int64_t block_rows, int64_t block_k) {
    Device & d = device_of(buffer_of(codes));
    if (d.lost) return 0;
    const int64_t i_op = ++d.n_ops;
    if (d.settings.lose_at.hits(i_op)) {
        lose(d);
        return 0;
    }
    const double bytes = 3.0 * double(codes->ne[0] * codes->ne[1]);  // one is read and two are written
    const int64_t ns = std::llround(bytes / d.settings.memory_gbps * d.settings.slow + d.settings.launch_us * 1e3);
    std::function<void()> work;
    if (settings().computes) work = [&] { expand(codes, scales, out, block_rows, block_k); };
    sleep_until(d.compute.charge(now_ns(), ns, work));
    return 1;
}
