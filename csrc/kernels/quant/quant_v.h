// Conversion of V to numbers that the tensor cores add up faster: what host and device agree on.
#pragma once

#include "kernels/quant/quant_k_int8.h"

namespace sage {

struct QuantV {
  // Blocks of 64 keys with a scale for each channel, two to a span, as K's are.
  static constexpr int kBlockN = QuantKInt8::kBlockN;
  static constexpr int kSpanN = KvSpans::kSpanN;
  // A warp takes 16 keys and 64 channels.
  static constexpr int threads(int head_dim) { return kBlockN / 16 * (head_dim / 64) * 32; }
  // Of a block's scales, of `size` bytes each: 4, a float32, or 1, the exponent byte of one that is a power of two, 255 where V holds what is
  // no number. Then, in 16 bytes, a float32 that is not 0 where the mean was not subtracted though it is from others.
  SAGE_HOST_DEVICE static constexpr int scale_bytes(int size, int head_dim) { return size * head_dim + 16; }

  static constexpr int kSampledKeys = QuantKInt8::kSampledKeys;
  // The i-th key of thread j's part of a chunk of 16: 2j, 2j + 1, 2j + 8 and 2j + 9, which are a word of 8-bit V.
  SAGE_HOST_DEVICE static constexpr int key(int chunk, int j, int i) { return chunk * 16 + j * 2 + i / 2 * 8 + i % 2; }

  struct Params : KvSpans {
    TensorView v;
    // [batch, kv_heads, blocks, ...], or packed as k_int8 is; zero past kv_len and head_dim; the vectors of a row stand where
    // shared memory wants them (swizzle.cuh).
    uint8_t* v_quantised;
    uint8_t* v_scale;  // [batch, kv_heads, blocks, scale_bytes(kScaleSize, kHeadDim)]; in kScaleUnit
    float* v_mean;     // [batch or sequences, kv_heads, kHeadDim], written; null: V is not smoothed
  };

  // Whether the first key that is seen is left out, its value being attention's to add: no scale is for it, nor does it keep the mean from being taken.
  SAGE_HOST_DEVICE static constexpr bool first_apart() { return false; }
  // What sums of products times scales count: so large that sums over all keys fit float32 whatever bfloat16 holds.
  static constexpr int kUnitExponent = 40;
  static constexpr float kScaleUnit = 1099511627776.0f;  // 2^40
};
static_assert(QuantV::kScaleUnit == static_cast<float>(int64_t{1} << QuantV::kUnitExponent));

}  // namespace sage
