// How the mma.sync attention kernels cut up the problem: what host and device agree on.
#pragma once

#include "kernels/attention/params.h"

namespace sage {

struct MmaSyncTiles {
  static constexpr int kBlockM = 128;  // rows of the output of a block of threads
  static constexpr int kBlockN = 64;   // keys of a stage
  static constexpr int kStages = 2;
  // Of shared memory, behind the stages: which part this block of threads computes, and its rows' scales.
  static constexpr int kTileBytes = 128;
  static constexpr int kQScaleBytes = kBlockM * 4;
  // 32 rows a warp: each fragment of K and V read from shared memory feeds two mma. With 16 rows shared memory's bandwidth,
  // not the tensor cores, would be the limit; but at head_dim 256 the registers hold no more than 16.
  static constexpr int warps(int head_dim) { return head_dim <= 128 ? 4 : 8; }
  static constexpr int threads(int head_dim) { return 32 * warps(head_dim); }
  using Params = AttentionParams;
};

// V in the caller's 16 bits.
struct MmaSyncTilesF16 : MmaSyncTiles {
  static constexpr int stage_bytes(int head_dim) { return kBlockN * head_dim * (1 + 2); }
  static constexpr int shared_bytes(int head_dim) { return kStages * stage_bytes(head_dim) + kTileBytes + kQScaleBytes; }
};

// V in e4m3, with a scale for each channel of a block of keys. Stages start on 1024 bytes.
struct MmaSyncTilesF8 : MmaSyncTiles {
  static constexpr int stage_bytes(int head_dim) { return (kBlockN * head_dim * (1 + 1) + head_dim * 4 + 1023) / 1024 * 1024; }
  static constexpr int shared_bytes(int head_dim) { return kStages * stage_bytes(head_dim) + kTileBytes + kQScaleBytes; }
};

}  // namespace sage
