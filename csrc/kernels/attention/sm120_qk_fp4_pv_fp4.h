// Attention in FP4: what host and device agree on.
#pragma once

#include "kernels/attention/mma_sync/layout.h"
#include "kernels/mask/seen_keys.h"
#include "kernels/quant/fp4.h"

namespace sage {

struct Sm120QkFp4PvFp4 : MmaSyncBlocks {
  // A stage: numbers of K and of V, which start on 1024 bytes; what else Fp4 says of the blocks; V's scales; scores of Q's mean.
  static constexpr int scale_bytes(int head_dim) { return QuantV::scale_bytes(4, head_dim); }
  static constexpr int kMeanScoreBytes = kBlockN * 4;
  static constexpr int stage_bytes(int head_dim) {
    return (Fp4::k_block(head_dim) + Fp4::v_block(head_dim) + scale_bytes(head_dim) + kMeanScoreBytes + 1023) / 1024 * 1024;
  }
  static constexpr int kMagnitudeBytes = 64;             // of Q, of each warp
  static constexpr int kFirstScoreBytes = kBlockM * 4;  // of each row with the first key that any sees
  static constexpr int shared_bytes(int head_dim) {
    return kStages * stage_bytes(head_dim) + kTileBytes + kMagnitudeBytes + kFirstScoreBytes;
  }

  struct Params : AttentionParams {
    const uint8_t* k_fp4;      // as QuantKFp4 leaves it
    const uint8_t* q_mean;     // as Means leaves it
    const float* mean_scores;  // as QuantKFp4 leaves them
    int32_t means;             // of a head, or of a packed sequence: one for each kBlockM rows, or 1
    SeenKeys::Words seen;      // as quantisation was told
  };
};

}  // namespace sage
