// What Hopper's attention kernel in 16 bits is compiled for, and where things lie in shared memory.
#pragma once

#include <cuda/std/type_traits>

#include "kernels/attention/sm90_qk_f16_pv_f16_masked.h"
#include "kernels/attention/ring.cuh"
#include "kernels/attention/tile.cuh"

namespace sage {

struct Config : Sm90QkF16PvF16 {
  using Element = SAGE_DTYPE;
  static constexpr int kHeadDim = SAGE_HEAD_DIM;
  static constexpr int kConsumers = consumers(kHeadDim);
  static constexpr int kTiles = tiles(kHeadDim);
  static constexpr int kTeams = teams(kHeadDim);
  static constexpr int kThreads = threads(kHeadDim);
  static constexpr int kBlockM = block_m(kHeadDim);
  // What the launch gives each thread is shared out anew.
  static constexpr int kLoaderRegisters = kHeadDim <= 64 ? 32 : kHeadDim <= 128 ? 56 : 40;
  static constexpr int kRegisters = kHeadDim <= 64 ? 112 : kHeadDim <= 128 ? 152 : 232;
  static_assert(kLoaderRegisters + kTeams * kConsumers * kRegisters <= 65536 / kThreads / 8 * 8 * (1 + kTeams * kConsumers));
  static constexpr int kPanels = kHeadDim / 64;  // of 64 channels, the span of the hardware's swizzle: 128 bytes a row
  static constexpr int kBlockPanelBytes = kBlockN * 128;
  static constexpr int kBlockBytes = kPanels * kBlockPanelBytes;  // of K or V
  static constexpr int kQkSteps = kHeadDim / 16;
  static constexpr int kPvSteps = kBlockN / 16;

  // Probabilities are relative to a row's base: its largest score when that was last raised, at which they are 2^kLevel, less kLevel. The final division makes
  // that good. The row's maximum may exceed that score by kHeadroom powers of two; beyond, the base rises and the output is rescaled.
  static constexpr bool kHalfRange = cuda::std::is_same_v<Element, __half>;
  static constexpr float kLevel = kHalfRange ? 0.0f : -54.0f;
  static constexpr float kHeadroom = kHalfRange ? 12.0f : 30.0f;  // of bfloat16, sums over all keys with V near 10^38 are numbers yet
  // A base is a rounded product, what it is subtracted from an exact one: beyond this the difference, four, is no small part of the headroom.
  static constexpr float kLargestScore = 0x1p25f;
  static constexpr float kNever = -3e38f;  // below all, but a number: scores may be -infinity, whose probability then is 0
};

// Offsets in shared memory, which each start on the swizzle's 1024 bytes, but for the last.
template <bool kMasked>
struct Shared {
  static constexpr int kMaskBytes = kMasked ? Sm90QkF16PvF16Masked::kMaskBytes : 0;  // of a warp
  static constexpr int kStages = Config::stages(Config::kHeadDim, kMaskBytes);
  static constexpr int kTeamBytes = Config::team_bytes(Config::kHeadDim, kMaskBytes);
  static constexpr int kQPanelBytes = Config::kBlockM * 128;
  static constexpr int kQBytes = Config::kPanels * kQPanelBytes;
  static constexpr int kQ = 0;
  static constexpr int kK = kQ + Config::kTiles * kQBytes;
  static constexpr int kV = kK + kStages * Config::kBlockBytes;
  static constexpr int kMask = kV + kStages * Config::kBlockBytes;  // of each warp
  static constexpr int kTile = kMask + 4 * Config::kConsumers * kMaskBytes;
  static constexpr int kDescribed = kTile + Config::kTiles * Config::kTileBytes;  // a tile is: without a mask Q is waited for at once
  static constexpr int kQFull = kMasked ? kDescribed + Config::kTiles * 8 : kDescribed;
  static constexpr int kQEmpty = kQFull + Config::kTiles * 8;
  static constexpr int kFull = kQEmpty + Config::kTiles * 8;  // a stage
  static constexpr int kEmpty = kFull + kStages * 8;
  static_assert(kEmpty + kStages * 8 <= kTeamBytes);
  static_assert(Config::shared_bytes(Config::kHeadDim, kMaskBytes) <= 232448);
};
static_assert(sizeof(Tile) <= Config::kTileBytes);

// A team's.
struct Memory {
  uint8_t* pointer;
  uint32_t address;

  __device__ __forceinline__ uint32_t barrier(int first, int place) const { return address + first + place * 8; }
  // Of the tile in this place of two, the first of which is at `first`. None is left where its qo_len is 0.
  __device__ __forceinline__ Tile& tile(int first, int place) const { return *reinterpret_cast<Tile*>(pointer + first + place * Config::kTileBytes); }
};

using Scores = float[Config::kBlockN / 2];
using Probabilities = uint32_t[Config::kPvSteps][4];  // wgmma A fragments
using Output = float[Config::kHeadDim / 2];

}  // namespace sage
