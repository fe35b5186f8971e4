// A mean of Q for each 128 rows, or of a sequence, and K's: what host and device agree on.
#pragma once

#include "kernels/attention/mma_sync/layout.h"

namespace sage {

struct Means {
  static constexpr int kRows = MmaSyncBlocks::kBlockM;  // and how many are looked at of a sequence
  static constexpr int kSampledKeys = QuantKInt8::kSampledKeys;
  static constexpr int kThreads = 256;
  struct Params {
    TensorView q;
    TensorView k;
    // [batch, q_heads, means, kHeadDim] or [sequences, q_heads, kHeadDim], in Q's dtype, written; zero past head_dim
    uint8_t* q_mean;
    float* k_mean;  // [batch or sequences, kv_heads, kHeadDim], of Q's dtype's numbers, written; its blocks come after Q's, if there are any
    int32_t q_blocks;  // of threads: the means of Q
    int32_t q_heads;
    int32_t kv_heads;
    int32_t qo_len;
    int32_t kv_len;
    int32_t head_dim;
    int32_t means;  // of a head of Q: one for each kRows rows, or 1
    const int32_t* cu_seqlens_q;  // null: not packed
    const int32_t* cu_seqlens_k;
    int32_t causal;
    SeenKeys::Words seen;
  };
};

}  // namespace sage
