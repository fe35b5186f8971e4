// How the mma.sync attention kernels cut up the problem: what host and device agree on.
#pragma once

#include "kernels/attention/params.h"
#include "kernels/quant/quant_v.h"

namespace sage {

struct MmaSyncBlocks {
  static constexpr int kBlockM = 128;  // rows of the output of a block of threads
  static constexpr int kBlockN = 64;   // keys of a stage
  static constexpr int kStages = 2;
  // Of shared memory, behind the stages: which tile this block of threads computes, its rows' scales, and K's of each stage.
  static constexpr int kTileBytes = 128;
  static constexpr int kQScaleBytes = kBlockM * 4;
  static constexpr int kKScaleBytes = QuantKInt8::kGroups * 4;
  // 32 rows a warp: each fragment of K and V read from shared memory feeds two mma. With 16 rows shared memory's bandwidth,
  // not the tensor cores, would be the limit; but at head_dim 256 the registers hold no more than 16.
  static constexpr int warps(int head_dim) { return head_dim <= 128 ? 4 : 8; }
  static constexpr int threads(int head_dim) { return 32 * warps(head_dim); }
  using Params = AttentionParams;
};

// What the formats of V differ in: bytes of a number and of a scale (0: there is none), and whether it is in e4m3, smoothed and its rows taken in
// two, of which each lane keeps something beside its registers. Scales lie behind all stages: at head_dim 256 there are no bytes to waste
// in 99 KiB.
template <int ValueBytes, int ScaleSize, bool E4m3>
struct MmaSyncLayout : MmaSyncBlocks {
  static constexpr int kValueBytes = ValueBytes;
  static constexpr int kVScaleSize = ScaleSize;
  static constexpr int scale_bytes(int head_dim) { return ScaleSize > 0 ? QuantV::scale_bytes(ScaleSize, head_dim) : 0; }
  static constexpr int stage_bytes(int head_dim) { return kBlockN * head_dim * (1 + ValueBytes); }
  static constexpr int kUnsmoothedBytes = E4m3 ? kBlockM * 4 * 4 : 0;  // four lanes a row
  static constexpr int notes_bytes(int head_dim) { return E4m3 ? threads(head_dim) * 16 : 0; }
  static constexpr int shared_bytes(int head_dim) {
    return kStages * (stage_bytes(head_dim) + kKScaleBytes + scale_bytes(head_dim)) + kTileBytes + kQScaleBytes + kUnsmoothedBytes +
           notes_bytes(head_dim);
  }
};

}  // namespace sage
