// How the mma.sync attention kernels cut up the problem: what host and device agree on.
#pragma once

#include "kernels/attention/params.h"
#include "kernels/quant/quant_v_f16.h"
#include "kernels/quant/quant_v_f8.h"

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

enum class Values { kAsGiven, kF16, kE4m3 };  // P and V: the caller's 16-bit type; FP16, V scaled; e4m3, V scaled

// What the formats of V differ in. In e4m3 it is smoothed, and rows are taken in two: of either each lane keeps something beside its registers. Scales lie
// behind all stages: at head_dim 256 there are no bytes to waste in 99 KiB.
template <Values Format>
struct MmaSyncLayout : MmaSyncBlocks {
  static constexpr Values kValues = Format;
  static constexpr int kValueBytes = kValues == Values::kE4m3 ? 1 : 2;
  static constexpr int kVScaleSize = kValues == Values::kE4m3 ? QuantVF8::kScaleSize : kValues == Values::kF16 ? QuantVF16::kScaleSize : 0;
  static constexpr int scale_bytes(int head_dim) { return kVScaleSize > 0 ? QuantV::scale_bytes(kVScaleSize, head_dim) : 0; }
  static constexpr int stage_bytes(int head_dim) { return kBlockN * head_dim * (1 + kValueBytes); }
  static constexpr int kUnsmoothedBytes = kValues == Values::kE4m3 ? kBlockM * 4 * 4 : 0;  // four lanes a row
  static constexpr int notes_bytes(int head_dim) { return kValues == Values::kE4m3 ? threads(head_dim) * 16 : 0; }
  static constexpr int shared_bytes(int head_dim) {
    return kStages * (stage_bytes(head_dim) + kKScaleBytes + scale_bytes(head_dim)) + kTileBytes + kQScaleBytes + kUnsmoothedBytes +
           notes_bytes(head_dim);
  }
};

}  // namespace sage
