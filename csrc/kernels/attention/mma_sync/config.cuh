// What the mma.sync attention kernels' code is compiled for, and what of that is derived.
#pragma once

#include "kernels/attention/mma_sync/tiles.h"
#include "kernels/quant/quant_k_int8.h"

namespace sage {

enum class Values { kF16, kF8 };         // P and V: the caller's 16-bit type, or e4m3
enum class Sums { kFloat, kHalf };       // what the tensor cores add them in

template <typename Kernel, int HeadDim, typename ElementType, Values ValueType, Sums SumType>
struct MmaSyncConfig : Kernel {
  using Element = ElementType;
  static constexpr Values kValues = ValueType;
  static constexpr Sums kSums = SumType;
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kThreads = Kernel::threads(kHeadDim);
  static constexpr int kWarpM = Kernel::kBlockM / Kernel::warps(kHeadDim);
  // Blocks of threads that the registers of a multiprocessor shall hold.
  static constexpr int kBlocksPerSm = 256 / kThreads;

  // Of compute capability 9.0 and 10.x only wgmma and tcgen05 multiply e4m3: P and V become FP16 again.
#if __CUDA_ARCH__ / 100 == 9 || __CUDA_ARCH__ / 100 == 10
  static constexpr bool kConvert = kValues == Values::kF8;
#else
  static constexpr bool kConvert = false;
#endif

  // Keys that one mma of P V takes.
  static constexpr int kStepN = kValues == Values::kF16 || kConvert ? 16 : 32;
  // Keys whose scores are in registers at a time: as many as spill nothing, for the tensor cores lose time wherever products of
  // integers and of floats take turns. From 10.0 on CUDA 12 needs more registers for the same.
#if __CUDA_ARCH__ >= 1000
  static constexpr bool kRoomy = false;
#else
  static constexpr bool kRoomy = kValues == Values::kF16 && kSums == Sums::kFloat;
#endif
  static constexpr int kChunkN = kHeadDim == 64 ? 64 : kRoomy ? 32 : 16;
  // Keys whose probabilities are gathered before they meet V: in 8 bits all that share V's scales.
  static constexpr int kGatherN = kValues == Values::kF16 ? kChunkN : Kernel::kBlockN;
  static constexpr int kMTiles = kWarpM / 16;
  static constexpr int kNTiles = kChunkN / 8;
  static constexpr int kRows = 2 * kMTiles;  // rows of which a lane holds a part: lane / 4 + 8 * row
  static constexpr int kQkSteps = kHeadDim / 32;
  static constexpr int kPvSteps = kGatherN / kStepN;
  static constexpr int kOTiles = kHeadDim / 8;

  // A stage: K [64 keys][head_dim], then V [64 keys][head_dim] or, in 8 bits, transposed [head_dim][64 keys], and its scales.
  static constexpr int kKRowBytes = kHeadDim < 128 ? kHeadDim : 128;  // of a panel
  static constexpr int kVRowBytes = kValues == Values::kF16 ? kHeadDim * 2 : Kernel::kBlockN;
  static constexpr int kKTileBytes = Kernel::kBlockN * kHeadDim;
  static constexpr int kVTileBytes = Kernel::kBlockN * kHeadDim * (kValues == Values::kF16 ? 2 : 1);
  static constexpr int kVScaleBytes = kValues == Values::kF16 ? 0 : kHeadDim * 4;
  static constexpr int kVScaleOffset = kKTileBytes + kVTileBytes;
  static constexpr int kStageBytes = Kernel::stage_bytes(kHeadDim);
  static_assert(kVScaleOffset + kVScaleBytes <= kStageBytes && kStageBytes % 1024 == 0);
  static constexpr int kTileOffset = Kernel::kStages * kStageBytes;
  static constexpr int kQScaleOffset = kTileOffset + Kernel::kTileBytes;
  static_assert(kQScaleOffset + Kernel::kQScaleBytes == Kernel::shared_bytes(kHeadDim));
  static_assert(Kernel::kBlockN == QuantKInt8::kBlockN, "one set of K scales a stage");

  // The int32 accumulators of QK^T start at the bits of 1.5 * 2^23, so that they read as that float plus the score:
  // |score| <= 127 * 127 * kHeadDim < 2^22 stays in the mantissa. The constant then folds into the softmax's FMA.
  static constexpr int32_t kMagicBits = 0x4B400000;
  static constexpr float kMagic = 12582912.0f;
  static_assert(127 * 127 * kHeadDim < (1 << 22));

  // Probabilities are kept relative to a maximum of the row that is renewed only when a thread adds up more than kLimit of them
  // in a chunk; the final division makes the result exact whatever it was. At that maximum they are 2^kLogOfOne, of which 16 (a
  // thread's part of 64 keys) stay below the limit:
  //   16 bits  1; fp16 and bf16 hold 256 as precisely as less
  //   FP16 sums  2^-7; the 16 keys of a sum lie with four threads: they add up to 1 at most, so it is no larger than V's largest
  //   e4m3  2^4.5; 448 is the largest number, and this as far from the subnormal ones as that allows. With |V| <= 4.5 (QuantVF8)
  //   the sum of 32 products, of two chunks, is at most 8 * 448 * 4.5 = 16128: no overflow in FP16 either
  static constexpr float kLimit = kValues == Values::kF8 ? 448.0f : kSums == Sums::kHalf ? 0.25f : 256.0f;
  static constexpr float kLogOfOne = kValues == Values::kF8 ? 4.5f : kSums == Sums::kHalf ? -7.0f : 0.0f;
  // Stands for -infinity where differences are taken: below any score, and its powers of two are 0.
  static constexpr float kNever = -1e30f;
};

}  // namespace sage
