// What Hopper's attention kernel is compiled for, and where things lie in shared memory.
#pragma once

#include <cuda/std/type_traits>

#include "kernels/attention/sm90_qk_int8_pv_f16_masked.h"
#include "kernels/attention/ring.cuh"
#include "kernels/attention/tile.cuh"
#include "kernels/ptx/cluster.cuh"

namespace sage {

struct Config : Sm90QkInt8PvF16 {
  using Element = SAGE_DTYPE;
  static constexpr int kHeadDim = SAGE_HEAD_DIM;
  static constexpr int kConsumers = consumers(kHeadDim);
  static constexpr int kThreads = threads(kHeadDim);
  static constexpr int kBlockM = block_m(kHeadDim);
  static constexpr int kStages = stages(kHeadDim);
  static constexpr int kStageBlocks = stage_blocks(kHeadDim);
  static constexpr bool kKeepQ = keeps_q(kHeadDim);
  static constexpr int kKRowBytes = kHeadDim < 128 ? kHeadDim : 128;  // of a panel of Q or K
  static constexpr int kKBlockBytes = kBlockN * kHeadDim;
  static constexpr int kVBlockBytes = kBlockN * kHeadDim * 2;
  // V's rows are cut into panels of 64 channels, the span of the hardware's swizzle.
  static constexpr int kVPanelBytes = kBlockN * 128;
  static constexpr int kVPanels = kHeadDim / 64;
  static constexpr int kQkSteps = kHeadDim / 32;
  static constexpr int kPvSteps = kBlockN / 16;
  static constexpr int kConsumerWarps = consumer_warps(kHeadDim);
  static constexpr int kPartialFloats = partial_floats(kHeadDim);
  static constexpr int kScaleRingBytes = scale_ring_bytes(kHeadDim);
  static constexpr int kScaleStageBytes = kStageBlocks * kScaleBytes;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
  // What the launch gives a warpgroup's worth of threads is shared out: 65536 registers by all threads, in eights.
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 65536 / kThreads / 8 * 8 * (1 + kConsumers));

  // Probabilities are relative to a row's base: its largest score when that was last raised, at which they are 2^kLevel, less kLevel. The final division
  // makes that good. The row's maximum may exceed that score by kHeadroom powers of two; beyond, the base rises and the output is rescaled. Of bfloat16
  // that is so far that bounds mostly tell; low enough that a hundred products with its largest numbers have a sum even there, high enough for products
  // with 2^-50. Probabilities of scores like `randn`'s lie 2^1 to 2^7 below the first block's largest: there between two exponents that are multiples of
  // 8, since bits of A that change take power, which is what bounds long sequences (bench/notes-hopper.md). Of float16 as high as the headroom lets it: a
  // hundred thousand keys behind a sink that has nearly all of a row are to keep some bits.
  static constexpr bool kHalfRange = cuda::std::is_same_v<Element, __half>;
  static constexpr float kLevel = kHalfRange ? 3.0f : -87.0f;
  static constexpr float kHeadroom = kHalfRange ? 12.0f : 80.0f;
  // Of float16, whose range is short, bounds rarely tell that a block does not exceed the headroom, but mostly that float32 holds its
  // probabilities. Then a lane's sum beyond this tells that it does.
  static constexpr float kBoundHeadroom = kHalfRange ? 117.0f : kHeadroom;
  static constexpr float kLargestSum = 65504.0f;
  // Whether registers reach to keep what derives from the lane from one block of keys to the next: CUDA 12's do not, nor do any in float16.
  static constexpr bool kKeepLane = __CUDACC_VER_MAJOR__ >= 13 && !kHalfRange;
  // Scores beyond this, in log2 units, are no longer told apart where it matters: such a row's are made smaller.
  static constexpr float kLargestScore = 0x1p20f;
};

// Offsets in shared memory.
struct Shared {
  static constexpr int kRowBytes = Config::kBlockM * 4;
  static constexpr int kQ = 0;      // as the caller's, in panels of 64 channels, where registers keep it in INT8;
  static constexpr int kQInt8 = 0;  // else in INT8
  static constexpr int kQPanelBytes = Config::kBlockM * 128;
  static constexpr int kQBytes = Config::kBlockM * Config::kHeadDim * (Config::kKeepQ ? 2 : 1);
  static constexpr int kK = kQ + kQBytes;
  static constexpr int kV = kK + Config::kStages * Config::kStageBlocks * Config::kKBlockBytes;
  static constexpr int kKScale = kV + Config::kStages * Config::kStageBlocks * Config::kVBlockBytes;  // under a mask: of the stage
  static constexpr int kSeen = kKScale + Config::kStages * Config::kStageBlocks * Config::kScaleBytes;
  static constexpr int kQScale = kSeen + Config::kStages * Config::kStageBlocks * Config::kSeenBytes;  // of the row, in sm_scale's unit: under a mask and for log-sum-exp
  static constexpr int kQReach = kQScale + kRowBytes;  // no score of the row exceeds its key's bound over this
  static constexpr int kQShift = kQReach + kRowBytes;  // what smoothing K took off the row's scores
  static constexpr int kTile = kQShift + kRowBytes;
  static constexpr int kFull = kTile + 2 * Config::kTileBytes;
  static constexpr int kEmpty = kFull + Config::kStages * 8;
  static constexpr int kQFull = kEmpty + Config::kStages * 8;
  static constexpr int kQEmpty = kQFull + 8;
  static constexpr int kLastV = kQEmpty + 8;
  static constexpr int kIndex = kLastV + 8;  // in a pair, from its first block to its second: the tile that comes next
  static constexpr int kIndexFull = kIndex + 8;
  static constexpr int kIndexEmpty = kIndexFull + 8;
  static constexpr int kNearEnd = kIndexEmpty + 8;  // few of the tile's blocks of keys are left to be fetched
  static constexpr int kTotal = kNearEnd + 8;
  static constexpr int kOut = (kTotal + 1023) / 1024 * 1024;  // where no mask is
  static_assert(kOut + 1024 == Config::bytes_of_all_kernels(Config::kHeadDim));
  static constexpr int kScaleRing = kOut + Config::kConsumerWarps * Config::kOutBytes;  // where no mask is, as are these
  static constexpr int kScalesEmpty = kScaleRing + Config::kScaleRingBytes;
  static_assert(kScalesEmpty + 8 + 1024 == Config::shared_bytes(Config::kHeadDim));
  static_assert(Config::shared_bytes(Config::kHeadDim) <= 232448);
  // Under a mask: what it adds to each warpgroup's scores, and barriers.
  using Masked = Sm90QkInt8PvF16Masked;
  static constexpr int kAdded = kOut;
  static constexpr int kAddedFull = kAdded + Config::kConsumers * Masked::kAddedBytes;
  static constexpr int kAddedEmpty = kAddedFull + Config::kConsumers * 8;
  static_assert(kAddedEmpty + Config::kConsumers * 8 + 1024 == Masked::shared_bytes(Config::kHeadDim));
  static_assert(Masked::shared_bytes(Config::kHeadDim) <= 232448);
  static_assert(kQ % 1024 == 0 && kK % 1024 == 0 && kV % 1024 == 0 && Config::kKBlockBytes % 1024 == 0);
};

// Shared memory as pointer and as the address that instructions take.
struct Memory {
  uint8_t* pointer;
  uint32_t address;

  template <typename T>
  __device__ __forceinline__ T* at(int offset) const {
    return reinterpret_cast<T*>(pointer + offset);
  }
};

// A tile of the output as the warps that compute are told of it; none is left where `qo_len` is 0. A cluster, which is a pair of
// blocks or one on its own, computes neighbouring rows of a head; the keys are those that some of its rows sees. Of its 64 rows each the blocks
// take one after the other in turn, so that each has as many where a sequence ends or, under a causal mask, rows see fewer keys. Where a packed
// sequence ends with no more rows than a block's, the blocks of a pair each compute them alone, of a head of its own.
struct Work : Tile {
  int parts;  // how many clusters compute the tile, from a part of its keys each
  int part;   // which this is
  int left;   // which of such tiles
  int rotated;  // whether Q is to be, as whoever loads K says with the first stage
  int known_rotated;  // the same as far as whoever hands the tile out knows: before K's kernel has ended, as of a cluster's first tile, no
  int alone;    // whether this block of a pair computes the rows alone: of packed sequences

  // `part` being the item's number: has its part of the tile's keys be all that there are.
  __device__ __forceinline__ void take_part(const Config::Params& p) {
    left = part;
    part = 0;
#pragma unroll 1
    for (; left >= p.tiles; left -= p.parted_tiles) ++part;
    left -= p.tiles - p.parted_tiles;
    parts = left < 0 ? 1 : p.parts;
    if (parts == 1) return;
    const int first = blocks * part / parts, end = blocks * (part + 1) / parts;
    kv_block += first;
    kv_token += first * Config::kBlockN;
    kv_len = min(kv_len, end * Config::kBlockN) - first * Config::kBlockN;
    blocks = end - first;
  }

  // Of the cluster's 64 rows each, counted from its first, those of this block's warpgroup, if it is not alone; and where they start.
  static __device__ __forceinline__ int place(int group) { return group * ptx::cluster_size() + ptx::cluster_rank(); }
  template <bool Packed>
  __device__ __forceinline__ int row(int group) const { return first_row + (Packed && alone ? group : place(group)) * Config::kRows; }

  // Tiles of keys that some row sees; one, hidden as a whole, where there is none.
  __device__ __forceinline__ int key_blocks() const { return max(1, blocks); }
};
static_assert(sizeof(Work) <= Config::kTileBytes);

// The tile of the output that is computed in turns of this parity.
__device__ __forceinline__ Work& work_of(uint32_t parity, const Memory& shared) {
  return *shared.at<Work>(Shared::kTile + parity * Config::kTileBytes);
}

// A stage holds one or two blocks of K and for each the block of V before it: what one step multiplies. So a last block of V follows those of K.
using Stages = Ring<Config::kStages>;

}  // namespace sage
