// Scores of Q's means: what host and device agree on.
#pragma once

#include "kernels/quant/mean_q.h"

namespace sage {

struct MeanScores {
  static constexpr int kSpanN = QuantKInt8::kSpanN;  // keys of a block of threads
  static constexpr int kThreads = 128;
  struct Params {
    TensorView k;
    const uint8_t* q_mean;  // as MeanQ leaves them
    const float* k_mean;    // as QuantKFp4 leaves them; null: K is not smoothed
    // [batch, q_heads, means, keys] or, packed, [q_heads, keys], written: products with K less its mean, in log2 units; `keys` are those of
    // whole spans, or of all slots for spans
    float* scores;
    int32_t q_heads;
    int32_t kv_heads;
    int32_t kv_len;
    int32_t head_dim;
    int32_t sequences;
    int32_t means;
    float scale_log2;  // sm_scale * log2(e)
    const int32_t* cu_seqlens;  // of K; null: not packed
  };
};

}  // namespace sage
