// Quantisation of K to e2m1, and its products with Q's means: what host and device agree on.
#pragma once

#include "kernels/quant/fp4.h"
#include "kernels/quant/means.h"

namespace sage {

struct QuantKFp4 {
  static constexpr int kBlockN = QuantKInt8::kBlockN;
  static constexpr int kSpanN = KvSpans::kSpanN;  // keys of a block of threads
  static constexpr int kRows = Means::kRows;
  static constexpr int kMeans = 16;  // that a product has
  struct Params : KvSpans {
    TensorView k;
    uint8_t* k_fp4;         // [batch, kv_heads, blocks], or packed as k_int8 is, of Fp4::k_block, written; zero past kv_len and head_dim
    const float* k_mean;    // as Means leaves it; null: K is not smoothed
    const uint8_t* q_mean;  // as Means leaves them
    // [batch, q_heads, means, keys] or, packed, [q_heads, keys], written: products of Q's means with K less its mean, in log2 units; `keys` are
    // those of whole spans, or of all slots for spans
    float* mean_scores;
    int32_t q_heads;
    int32_t means;
    int32_t parts;   // blocks of threads that share a span's products
    int32_t causal;  // products that nothing reads are left out
    float scale_log2;  // sm_scale * log2(e)
  };
};

}  // namespace sage
