// A mean of Q for each 128 rows, or of a sequence: what host and device agree on.
#pragma once

#include "kernels/attention/mma_sync/layout.h"

namespace sage {

struct MeanQ {
  static constexpr int kRows = MmaSyncBlocks::kBlockM;  // and how many are looked at of a sequence
  static constexpr int kThreads = 256;
  struct Params {
    TensorView q;
    // [batch, q_heads, means, kHeadDim] or [sequences, q_heads, kHeadDim], in Q's dtype, written; zero past head_dim
    uint8_t* q_mean;
    int32_t q_heads;
    int32_t qo_len;
    int32_t head_dim;
    int32_t means;              // of a head: one for each kRows rows, or 1
    const int32_t* cu_seqlens;  // null: not packed
  };
};

}  // namespace sage
