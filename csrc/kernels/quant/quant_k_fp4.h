// Quantisation of K to e2m1: what host and device agree on.
#pragma once

#include "kernels/quant/fp4.h"

namespace sage {

struct QuantKFp4 {
  static constexpr int kBlockN = QuantKInt8::kBlockN;
  static constexpr int kSpanN = QuantKInt8::kSpanN;
  static constexpr int kThreads = 256;
  static constexpr int kSampledKeys = QuantKInt8::kSampledKeys;
  struct Params {
    TensorView k;
    uint8_t* k_fp4;  // [batch, kv_heads, blocks], or packed as k_int8 is, of Fp4::k_block; zero past kv_len and head_dim
    float* k_mean;   // [batch or sequences, kv_heads, kHeadDim], written; null: K is not smoothed
    int32_t kv_heads;
    int32_t kv_len;
    int32_t head_dim;
    int32_t sequences;
    int32_t together;           // spans of a block of threads, which all but the first cost it no sample
    const int32_t* cu_seqlens;  // null: not packed
  };
};

}  // namespace sage
