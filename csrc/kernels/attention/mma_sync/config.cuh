// What the mma.sync attention kernels' code is compiled for, and what of that is derived.
#pragma once

#include <cuda_fp16.h>

#include <cuda/std/type_traits>

#include "kernels/attention/mma_sync/layout.h"
#include "kernels/quant/quant_k_int8.h"

namespace sage {

enum class Sums { kFloat, kHalf };  // what the tensor cores add products of P and V up in

template <typename Kernel, Sums SumType>
struct MmaSyncConfig : Kernel {
  using Element = SAGE_DTYPE;
  using Kernel::kValues;
  static constexpr bool kSmooths = kValues == Values::kE4m3;
  static constexpr Sums kSums = SumType;
  static constexpr int kHeadDim = SAGE_HEAD_DIM;
  static constexpr int kThreads = Kernel::threads(kHeadDim);
  static constexpr int kWarpM = Kernel::kBlockM / Kernel::warps(kHeadDim);
  // Blocks of threads that the registers of a multiprocessor shall hold.
  static constexpr int kBlocksPerSm = 256 / kThreads;

  // Of compute capability 9.0 only wgmma multiplies e4m3: P and V become FP16 again.
#if __CUDA_ARCH__ / 100 == 9
  static constexpr bool kConvert = kValues == Values::kE4m3;
#else
  static constexpr bool kConvert = false;
#endif

  // V with a scale for each channel of a block of keys, from quant_v_f16 or quant_v_f8.
  static constexpr bool kScaled = kValues != Values::kAsGiven;
  // What P is rounded to.
  using ProbabilityType = cuda::std::conditional_t<kScaled, __half, Element>;

  // Keys that a fragment of P holds.
  static constexpr int kStepN = kValues == Values::kE4m3 ? 32 : 16;
  // Keys whose scores are in registers at a time: as many as spill nothing, for the tensor cores lose time wherever products of
  // integers and of floats take turns. From 10.0 on CUDA 12 needs more registers for V in 16 bits.
#if __CUDA_ARCH__ >= 1000
  static constexpr bool kRoomy = kValues == Values::kE4m3;
#else
  static constexpr bool kRoomy = true;
#endif
  static constexpr int kChunkN = kHeadDim == 64 ? 64 : kRoomy ? 32 : 16;
  // Keys whose probabilities are gathered before they meet V: all that share V's scales, which FP16 sums are of too.
  static constexpr int kGatherN = kScaled ? Kernel::kBlockN : kChunkN;
  static constexpr int kChunks = kGatherN / kChunkN;
  static constexpr int kMFragments = kWarpM / 16;
  static constexpr int kNFragments = kChunkN / 8;
  static constexpr int kRows = 2 * kMFragments;  // rows of which a lane holds some channels: lane / 4 + 8 * row
  static constexpr int kQkSteps = kHeadDim / 32;
  static constexpr int kPvSteps = kGatherN / kStepN;
  static constexpr int kOFragments = kHeadDim / 8;

  // A stage: K [64 keys][head_dim], then V [64 keys][head_dim] or, in 8 bits, transposed [head_dim][64 keys].
  static constexpr int kKRowBytes = kHeadDim < 128 ? kHeadDim : 128;  // of a panel
  static constexpr int kVRowBytes = kValues == Values::kE4m3 ? Kernel::kBlockN : kHeadDim * 2;
  static constexpr int kKBlockBytes = Kernel::kBlockN * kHeadDim;
  static constexpr int kVBlockBytes = Kernel::kBlockN * kHeadDim * Kernel::kValueBytes;
  static constexpr int kStageBytes = Kernel::stage_bytes(kHeadDim);
  static_assert(kKBlockBytes + kVBlockBytes == kStageBytes && kStageBytes % 1024 == 0);
  static constexpr int kTileOffset = Kernel::kStages * kStageBytes;
  static constexpr int kQScaleOffset = kTileOffset + Kernel::kTileBytes;
  static constexpr int kKScaleOffset = kQScaleOffset + Kernel::kQScaleBytes;
  static constexpr int kUnsmoothedOffset = kKScaleOffset + Kernel::kStages * Kernel::kKScaleBytes;
  static constexpr int kNotesOffset = kUnsmoothedOffset + Kernel::kUnsmoothedBytes;
  static constexpr int kNotesBytes = Kernel::notes_bytes(kHeadDim);
  // What quant_v says of V: scales, and whether its mean was left where others' is not.
  static constexpr int kVScaleOffset = kNotesOffset + kNotesBytes;
  static constexpr int kVScaleBytes = Kernel::scale_bytes(kHeadDim);
  static constexpr int kUnsmoothedFlag = kHeadDim * 4;  // behind the scales
  static_assert(kVScaleOffset + Kernel::kStages * kVScaleBytes == Kernel::shared_bytes(kHeadDim));
  static_assert(Kernel::kBlockN == QuantKInt8::kBlockN, "one set of K scales a stage");

  // The int32 accumulators of QK^T start at the bits of 1.5 * 2^23, so that they read as that float plus the score:
  // |score| <= 127 * 127 * kHeadDim < 2^22 stays in the mantissa. The constant then folds into the softmax's FMA.
  static constexpr int32_t kMagicBits = 0x4B400000;
  static constexpr float kMagic = 12582912.0f;
  static constexpr float kCoarsest = 0x1p-4f;  // scale of scores, in log2 units, whose product with kMagic is exact to a twentieth
  static_assert(127 * 127 * kHeadDim < (1 << 22));

  // Probabilities are kept relative to a maximum of the row that is renewed only when a thread adds up more than kLimit of them in a
  // chunk; the final division makes the result exact whatever it was. At that maximum they are 2^kLevel:
  //   fp16   2^2; the limit is fp16's largest. As many as 2^16 below are not yet subnormal
  //   bf16   2^-60, the limit 2^40 above: sums over all keys of products with the largest numbers of its range are numbers
  //   FP16, V scaled   2^4: more would be exact behind sinks of longer sequences, and slower where maxima rise (bench/notes-mma-sync.md).
  //          The 64 keys of a sum, of four chunks or fewer, lie with four threads: with |V| <= 4.5 / 32 it is at most
  //          4 * 4 * 2^14 * 4.5 / 32 = 36864
  //   e4m3   2^2; 448 is the largest number, and as many as 2^8 below are not yet subnormal. The 64 keys of a sum, of two chunks or one,
  //          lie with four threads, and rounding adds a sixteenth: at most 2 * 4 * 448 * 17/16 * 4.5 = 17136
  // A power of two, which rounding leaves as it is: a row's largest probability matters most.
  static constexpr bool kHalfRange = cuda::std::is_same_v<Element, __half>;
  static constexpr float kLevel = kValues == Values::kE4m3 ? 2.0f : kScaled ? 4.0f : kHalfRange ? 2.0f : -60.0f;
  static constexpr float kLimit = kValues == Values::kE4m3 ? 448.0f : kScaled ? 0x1p14f : kHalfRange ? 65504.0f : 0x1p-20f;
  static_assert(kLevel < 8.0f, "subtracted from a score of 2^27 it may round to twice itself, and 2^16 is no number of FP16");
  static constexpr float kLargestV = kValues == Values::kE4m3 ? QuantVF8::kLargest : QuantVF16::kLargest;
  static_assert(!kScaled || kChunks * 4 * kLimit * (kValues == Values::kE4m3 ? 1.0625f : 1.0f) * kLargestV < 65504.0f);
  // Stands for -infinity where differences are taken: below any score, and its powers of two are 0.
  static constexpr float kNever = -1e30f;

  // e4m3 has 14 powers of two between its largest number and the first subnormal one. A key that outweighs the others of its block by
  // more, as an attention sink does, leaves them rounded to little or nothing, and where its value is small they were what counted.
  // So such rows are taken in two: then what rounding left of probabilities below kRestBelow, 2^kRest times finer. Which rows: those
  // whose maximum has risen by kJump powers of two, and of which a key is below; and those whose first maximum left four keys of a thread
  // below. Less will do where one warp's rows agree, as a sink makes them: if of one in kQuorum, whose maximum has risen or in
  // blocks 1, 2, 4, 8, ..., half of the fours of a chunk are below. A mask may leave a sink alone in its chunk, or sinks fill it: so a
  // row that has seen nothing small since is asked again in the next chunk, unless keys of a thread, but for kFewKeys, are less than kNear in the mean, or
  // add up to kSettled.
  // Where scores are merely far apart all that would come back in every block: taken in two, a row has a base 2^kRest lower, and the next
  // block raises it. Then there are keys all the way down, where a sink leaves a gap. So none are taken in two if they have kBetween keys a row, in
  // the mean, that are neither near the row's largest nor small, and as many that are small but not nothing, to kTail times as many: beside the
  // former, what is rounded counts for little. Of one row or of very few keys that cannot be told. So within kRecent blocks a rise is no jump;
  // and where it befalls one row in kQuorum, and there is no gap (one candidate in kQuorum has a key between, and there are kTail times as
  // many small ones at most), the first block was taken in two in vain. That, and taking in two fewer rows than one in kQuorum, may
  // happen kInVain times, and once more in kPardon blocks. Beside sums of more than kEnough small keys count for nothing, and float32 cannot
  // lower a base beyond kLargestBase by kRest.
  static constexpr bool kTwice = kValues == Values::kE4m3;
  static constexpr float kRest = 14.0f;
  static constexpr float kRestBelow = 0x1p-6f;
  static constexpr float kJump = 10.0f;
  static constexpr float kNear = 1.0f;
  static constexpr float kFewKeys = 2.0f;
  static constexpr float kSettled = 0x1p7f;
  static constexpr int kBetween = 2;
  static constexpr int kTail = 4;
  static constexpr int kQuorum = 4;
  static constexpr int kRecent = 2;
  static constexpr int kInVain = 4;
  static constexpr int kPardon = 32;
  static constexpr float kEnough = 0x1p24f;
  static constexpr float kLargestBase = 0x1p20f;
};

}  // namespace sage
