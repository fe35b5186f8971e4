// Attention with INT8 QK^T and FP16/BF16 PV on mma.sync: what host and device agree on.
#pragma once

#include "kernels/attention/params.h"

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

  using Params = AttentionParams;
};

}  // namespace sage
