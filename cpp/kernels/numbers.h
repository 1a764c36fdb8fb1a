// The floats behind the 8- and 16-bit formats, one at a time, in baseline code. Include inside namespace hybrid_moe: every
// file that does compiles its own copy, for its own ISA.
#pragma once

namespace {

inline float f32_of_bf16(uint16_t h) {
    const uint32_t bits = uint32_t(h) << 16;
    float f;
    __builtin_memcpy(&f, &bits, sizeof f);
    return f;
}

// IEEE half to float, subnormals and infinities included, without F16C.
inline float f32_of_f16(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16;
    const uint32_t exponent = (h >> 10) & 31;
    const uint32_t mantissa = h & 1023;
    uint32_t bits;
    if (exponent == 31) {
        bits = sign | 0x7F800000u | (mantissa << 13);
    } else if (exponent != 0) {
        bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
    } else {
        const float magnitude = float(mantissa) * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    float f;
    __builtin_memcpy(&f, &bits, sizeof f);
    return f;
}

// E4M3FN: 1 sign, 4 exponent (bias 7), 3 mantissa bits.
inline float f32_of_fp8(uint8_t code) {
    const int exponent = (code >> 3) & 15;
    const int mantissa = code & 7;
    if (exponent == 15 && mantissa == 7) return __builtin_nanf("");
    uint32_t bits = 0;
    if (exponent != 0) {
        bits = uint32_t(exponent + 120) << 23 | uint32_t(mantissa) << 20;
    } else {
        const float magnitude = float(mantissa) * 0x1p-9f;
        return code & 0x80 ? -magnitude : magnitude;
    }
    bits |= uint32_t(code & 0x80) << 24;
    float f;
    __builtin_memcpy(&f, &bits, sizeof f);
    return f;
}

inline uint16_t load_u16(const uint8_t * p) {
    uint16_t v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

}  // namespace
