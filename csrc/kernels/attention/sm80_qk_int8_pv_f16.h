// Attention with INT8 QK^T and FP16/BF16 PV on mma.sync: what host and device agree on.
#pragma once

#include "kernels/tensor_view.h"

namespace sage {

struct Sm80QkInt8PvF16 {
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  // 32 rows a warp: each fragment of K and V read from shared memory feeds two mma. With 16 rows shared memory's
  // bandwidth, not the tensor cores, would be the limit.
  static constexpr int kWarpM = 32;
  static constexpr int kBlockM = kWarps * kWarpM;
  static constexpr int kBlockN = 64;
  static constexpr int kStages = 2;

  static constexpr int shared_bytes(int head_dim) { return kStages * kBlockN * head_dim * (1 + 2); }

  struct Params {
    TensorView q;
    TensorView v;
    TensorView out;
    const int8_t* k_int8;  // as QuantKInt8 leaves them
    const float* k_scale;
    const float* k_mean;   // null: K was not smoothed
    float* lse;            // [batch, q_heads, qo_len], natural logarithm; null: not wanted
    int32_t q_heads;
    int32_t kv_heads;
    int32_t qo_len;
    int32_t kv_len;
    int32_t head_dim;      // of the tensors; the kernel's own may be larger
    int32_t causal;        // query i sees keys 0..i
    float scale_log2;      // sm_scale * log2(e)
  };
};

}  // namespace sage
