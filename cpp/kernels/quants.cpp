// Quantised blocks to floats, one value at a time: the reference for the vectorised decoders, on every CPU.
#include "quants.h"

namespace hybrid_moe {

#include "numbers.h"

namespace {

float f16_at(const uint8_t * p) { return f32_of_f16(load_u16(p)); }
int low(uint8_t byte) { return byte & 15; }
int high(uint8_t byte) { return byte >> 4; }

void decode_q8_0(const uint8_t * p, float * out) {
    const float d = f16_at(p);
    for (int i = 0; i < 32; i++) out[i] = d * float(int8_t(p[2 + i]));
}

void decode_q4_0(const uint8_t * p, float * out) {
    const float d = f16_at(p);
    for (int i = 0; i < 16; i++) {
        out[i]      = d * float(low(p[2 + i]) - 8);
        out[i + 16] = d * float(high(p[2 + i]) - 8);
    }
}

void decode_mxfp4(const uint8_t * p, float * out) {
    const uint32_t bits = half_e8m0_bits(p[0]);
    float d;
    __builtin_memcpy(&d, &bits, sizeof d);
    for (int i = 0; i < 16; i++) {
        out[i]      = d * float(e2m1_doubled[low(p[1 + i])]);
        out[i + 16] = d * float(e2m1_doubled[high(p[1 + i])]);
    }
}

// Half of the scale, which goes with e2m1_doubled; 0x7F, NaN in the format's definition, is 0 here as in ggml.
float half_ue4m3(uint8_t code) { return code == 0x7F ? 0.0f : 0.5f * f32_of_fp8(code & 0x7F); }

void decode_nvfp4(const uint8_t * p, float * out) {
    for (int s = 0; s < 4; s++) {
        const float d = half_ue4m3(p[s]);
        for (int i = 0; i < 8; i++) {
            const uint8_t q = p[4 + 8 * s + i];
            out[16 * s + i]     = d * float(e2m1_doubled[low(q)]);
            out[16 * s + i + 8] = d * float(e2m1_doubled[high(q)]);
        }
    }
}

// Q4_K (h is null) and Q5_K.
void decode_k4_k5(const uint8_t * p, const uint8_t * h, const uint8_t * q, float * out) {
    const float d    = f16_at(p);
    const float dmin = f16_at(p + 2);
    const KScales s(p + 4);
    for (int b = 0; b < 8; b++) {
        const float scale = d * s.scale(b);
        const float min   = dmin * s.min(b);
        for (int i = 0; i < 32; i++) {
            const uint8_t byte = q[b / 2 * 32 + i];
            const int fifth = h ? (h[i] >> b & 1) * 16 : 0;
            out[32 * b + i] = scale * float((b % 2 ? high(byte) : low(byte)) + fifth) - min;
        }
    }
}

void decode_q4_k(const uint8_t * p, float * out) { decode_k4_k5(p, nullptr, p + 16, out); }
void decode_q5_k(const uint8_t * p, float * out) { decode_k4_k5(p, p + 16, p + 48, out); }

void decode_q6_k(const uint8_t * p, float * out) {
    const float d = f16_at(p + 208);
    for (int i = 0; i < 256; i++) {
        const uint8_t l = p[i / 128 * 64 + i % 64];
        const uint8_t h = p[128 + i / 128 * 32 + i % 32];
        const int q = (i % 128 < 64 ? low(l) : high(l)) | (h >> (i % 128 / 32 * 2) & 3) << 4;
        out[i] = d * float(int8_t(p[192 + i / 16])) * float(q - 32);
    }
}

void decode_iq4_xs(const uint8_t * p, float * out) {
    const float d = f16_at(p);
    const uint16_t h = load_u16(p + 2);
    for (int b = 0; b < 8; b++) {
        const int scale = (p[4 + b / 2] >> (4 * (b % 2)) & 15) | (h >> (2 * b) & 3) << 4;
        const float dl = d * float(scale - 32);
        for (int i = 0; i < 16; i++) {
            const uint8_t q = p[8 + 16 * b + i];
            out[32 * b + i]      = dl * float(iq4_values[low(q)]);
            out[32 * b + i + 16] = dl * float(iq4_values[high(q)]);
        }
    }
}

using Decode = void (*)(const uint8_t * block, float * out);

Decode decoder_of(WeightType type) {
    switch (type) {
        case WeightType::q8_0:   return decode_q8_0;
        case WeightType::q4_0:   return decode_q4_0;
        case WeightType::q4_k:   return decode_q4_k;
        case WeightType::q5_k:   return decode_q5_k;
        case WeightType::q6_k:   return decode_q6_k;
        case WeightType::iq4_xs: return decode_iq4_xs;
        case WeightType::mxfp4:  return decode_mxfp4;
        case WeightType::nvfp4:  return decode_nvfp4;
        default:                 return nullptr;
    }
}

constexpr int64_t longest_block = 256;

}  // namespace

void expand_quants_scalar(const ExpertMatrix & e, int64_t i_row, int64_t i0, int64_t n, float * out) {
    const Decode decode = decoder_of(e.type);
    const int64_t len = group_len(e.type);
    for (int64_t i = i0; i < i0 + n; i += len) decode(e.row(i_row) + size_t(i / len) * group_bytes(e.type), out + (i - i0));
}

void multiply_quants_scalar(const ExpertMatrix & e, int64_t row0, int64_t row1, const TokenRows & t) {
    const int64_t len = group_len(e.type);
    float w[longest_block];
    for (int64_t r = row0; r < row1; r++) {
        for (int64_t j = 0; j < t.m; j++) t.y[j][r] = 0.0f;
        for (int64_t i0 = 0; i0 < e.k; i0 += len) {
            expand_quants_scalar(e, r, i0, len, w);
            for (int64_t j = 0; j < t.m; j++) {
                float sum = 0.0f;
                for (int64_t i = 0; i < len; i++) sum += w[i] * t.x[j][i0 + i];
                t.y[j][r] += sum;
            }
        }
    }
}

}  // namespace hybrid_moe
