// What the FP4 attention kernel's code is compiled for, and what of that is derived.
#pragma once

#include "kernels/attention/sm120_qk_fp4_pv_fp4.h"
#include "kernels/element.cuh"

namespace sage {

struct Config : Sm120QkFp4PvFp4 {
  using Element = SAGE_DTYPE;
  static constexpr int kHeadDim = SAGE_HEAD_DIM;
  static constexpr int kThreads = threads(kHeadDim);
  static constexpr int kWarpM = kBlockM / warps(kHeadDim);
  // Blocks of threads that the registers of a multiprocessor shall hold: the more warps, the less the tensor cores wait for exponentials.
  static constexpr int kBlocksPerSm = kHeadDim == 64 ? 3 : 256 / kThreads;
  static constexpr bool kScaled = true;
  static constexpr bool kSmooths = true;

  static constexpr int kChunkN = 32;  // keys whose scores are in registers at a time: a lane has half of two groups of each row
  static constexpr int kChunks = kBlockN / kChunkN;
  static constexpr int kMFragments = kWarpM / 16;
  static constexpr int kNFragments = kChunkN / 8;
  static constexpr int kRows = 2 * kMFragments;  // rows of which a lane holds some channels: lane / 4 + 8 * row
  static constexpr int kQkSteps = kHeadDim / 64;
  static constexpr int kOFragments = kHeadDim / 8;

  // A stage: Sm120QkFp4PvFp4 has what it holds, in this order.
  static constexpr int kKRowBytes = kHeadDim / 2;
  static constexpr int kVRowBytes = kBlockN / 2;
  static constexpr int kCodeBytes = Fp4::code_bytes(kHeadDim);  // of K or V
  static constexpr int kStageBytes = stage_bytes(kHeadDim);
  static constexpr int kVOffset = kCodeBytes;
  static constexpr int kKScaleOffset = kVOffset + kCodeBytes;
  static constexpr int kKScaleRowBytes = kHeadDim / Fp4::kGroup;
  static constexpr int kKUnitOffset = kKScaleOffset + Fp4::group_scale_bytes(kHeadDim);
  static constexpr int kVGroupScaleOffset = kKUnitOffset + 16;
  static constexpr int kVScaleOffset = kVGroupScaleOffset + Fp4::group_scale_bytes(kHeadDim);
  static constexpr int kVScaleBytes = scale_bytes(kHeadDim);
  static constexpr int kUnsmoothedFlag = kHeadDim * 4;  // behind the scales
  static constexpr int kMeanScoreOffset = kVScaleOffset + kVScaleBytes;
  static_assert(kMeanScoreOffset + kMeanScoreBytes <= kStageBytes && kCodeBytes % 1024 == 0);
  static constexpr int kTileOffset = kStages * kStageBytes;
  static constexpr int kMagnitudeOffset = kTileOffset + kTileBytes;
  static constexpr int kQUnitOffset = kMagnitudeOffset + kThreads / 32 * 4;
  static constexpr int kFirstScoreOffset = kMagnitudeOffset + kMagnitudeBytes;

  // Probabilities are kept relative to a base of their row, which is the largest score, less kLevel, when it was last renewed: when one
  // exceeds it by so much that the scale of its group would not fit e4m3. Scales of groups are the largest probability over 6: of that score a
  // power of two, which rounding leaves as it is, since a row's largest probability matters most.
  static constexpr float kLogOf6 = 2.584962500721156f;
  static constexpr float kLevel = 5.0f + kLogOf6;
  static constexpr float kHeadroom = 8.807354922057604f + kLogOf6;  // log2 of 448, e4m3's largest, and of 6
  // Stands for -infinity where differences are taken: below any score, and its powers of two are 0.
  static constexpr float kNever = -1e30f;
};

}  // namespace sage
