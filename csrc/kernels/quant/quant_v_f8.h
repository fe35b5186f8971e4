// Conversion of V to e4m3, transposed: what host and device agree on.
#pragma once

#include "kernels/quant/quant_k_int8.h"

namespace sage {

struct QuantVF8 {
  // Blocks of 64 keys with a scale for each channel, two to a block of threads, as K's are.
  static constexpr int kBlockN = QuantKInt8::kBlockN;
  static constexpr int kTileN = QuantKInt8::kTileN;
  static constexpr int kThreads = 256;
  static constexpr int kSampledKeys = QuantKInt8::kSampledKeys;

  struct Params {
    TensorView v;
    // [batch, kv_heads, blocks, kHeadDim, 64], or packed as k_int8 is; zero past kv_len and head_dim. In each 16 keys the order
    // is 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15, in which P's fragments come; the 16-byte chunks of a row stand where shared
    // memory wants them (swizzle.cuh).
    uint8_t* v_f8;
    float* v_scale;  // [batch, kv_heads, blocks, kHeadDim]
    float* v_mean;   // [batch or sequences, kv_heads, kHeadDim], written; null: V is not smoothed
    int32_t kv_heads;
    int32_t kv_len;
    int32_t head_dim;
    int32_t sequences;
    const int32_t* cu_seqlens;  // null: not packed
  };
};

}  // namespace sage
