// Scores of a chunk of keys: as the tensor cores give them, and, where something is to be hidden, in log2 units.
#pragma once

#include "kernels/attention/mask_value.cuh"
#include "kernels/attention/mma_sync/config.cuh"
#include "kernels/attention/tile.cuh"
#include "kernels/ptx/ldmatrix.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/mma_sync.cuh"

namespace sage {

// C fragments hold, of each 16 rows and 8 keys, rows lane / 4 and lane / 4 + 8, keys lane % 4 * 2 and the next. As they come, scores are the
// bits of floats kMagic + score.

// Of 16 rows, in log2 units; -infinity: hidden.
template <typename Config>
using LogScores = float[Config::kNFragments][4];
template <typename Config>
using Queries = uint32_t[Config::kMFragments][Config::kQkSteps][4];  // A fragments

// What some row of a block of threads does not see of a block of keys.
enum class Hidden {
  kNothing,
  kPastEnd,  // keys past the last and, if causal, past the row
  kByMask,   // those and what the mask says
};

// The first block from `block` on that the mask does not hide whole.
__device__ __forceinline__ int visible_block(const AttentionParams& p, const Tile& tile, int block) {
  if (p.mask.data != nullptr) {
    while (block < tile.blocks && tile.mask_tiles[block] == AttentionMask::kHidden) ++block;
  }
  return block;
}

__device__ __forceinline__ Hidden hidden_of(const AttentionParams& p, const Tile& tile, int block) {
  if (p.mask.data != nullptr && tile.mask_tiles[block] == AttentionMask::kMixed) return Hidden::kByMask;
  return block >= tile.full_blocks ? Hidden::kPastEnd : Hidden::kNothing;
}

// Scores, as they come, of `Count` times 16 of the warp's rows, from the First-th on.
template <typename Config, int First, int Count>
__device__ __forceinline__ void compute_scores(const Queries<Config>& q, uint32_t k_lane, int32_t (&scores)[Count][Config::kNFragments][4]) {
#pragma unroll
  for (int m = 0; m < Count; ++m) {
#pragma unroll
    for (int n = 0; n < Config::kNFragments; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[m][n][i] = Config::kMagicBits;
    }
  }
#pragma unroll
  for (int step = 0; step < Config::kQkSteps; ++step) {
#pragma unroll
    for (int pair = 0; pair < Config::kNFragments / 2; ++pair) {
      uint32_t k[4];
      ptx::ldmatrix_x4(k, ((k_lane + pair * 16 * Config::kKRowBytes) ^ (step % 4 * 32)) + step / 4 * (Config::kBlockN * 128));
#pragma unroll
      for (int m = 0; m < Count; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          ptx::mma_m16n8k32_s8(scores[m][pair * 2 + half], q[First + m][step], k[half * 2], k[half * 2 + 1]);
        }
      }
    }
  }
}

// What hiding goes by: where this lane's scores of the m-th 16 rows lie among queries and keys.
template <typename Config>
struct Place {
  int row;
  int key;

  __device__ __forceinline__ Place(const Tile& tile, int m, int first_key)
      : row(tile.first_row + threadIdx.x / 32 * Config::kWarpM + m * 16 + threadIdx.x % 32 / 4), key(first_key + threadIdx.x % 4 * 2) {}

  // Calls visit(score, row, key) for each, the latter two counted from here on.
  template <typename Visit>
  static __device__ __forceinline__ void each(LogScores<Config>& scores, const Visit& visit) {
#pragma unroll
    for (int n = 0; n < Config::kNFragments; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) visit(scores[n][i], i / 2 * 8, n * 8 + i % 2);
    }
  }
};

// -infinity for keys past the end and, if causal, past the row.
template <typename Config>
__device__ __forceinline__ void hide_past_end(const AttentionParams& p, const Tile& tile, const Place<Config>& place,
                                              LogScores<Config>& scores) {
  const int keys = tile.kv_len - place.key;
  const int diagonal = p.causal ? place.row - place.key : 1 << 30;  // how much further than a row a key may be
  Place<Config>::each(scores, [&](float& score, int row, int key) {
    if (key >= keys || key - row > diagonal) score = -INFINITY;
  });
}

// Adds the mask's values.
template <typename Config>
__device__ __forceinline__ void add_mask(const AttentionParams& p, const Tile& tile, const Place<Config>& place,
                                         LogScores<Config>& scores) {
  const uint8_t* mask = mask_row(p.mask, tile.batch, tile.head, place.row) + place.key * p.mask.key_stride;
  const int rows = tile.qo_len - place.row, keys = tile.kv_len - place.key;
  static_assert(8 * AttentionMask::kLargestRowStride + (Config::kChunkN - 7) * AttentionMask::kLargestKeyStride < int64_t{1} << 31);
  const auto row_stride = static_cast<int>(p.mask.row_stride), key_stride = static_cast<int>(p.mask.key_stride);
  Place<Config>::each(scores, [&](float& score, int row, int key) {
    if (key < keys && row < rows) score += mask_value(p.mask.type, mask + row * row_stride + key * key_stride);
  });
}

// Scores of the M-th 16 rows in log2 units, with hidden what is to be hidden. Each is rounded once: equal ones are equal, however large.
template <typename Config, int M>
__device__ __forceinline__ void compute_log_scores(const AttentionParams& p, const Tile& tile, const Queries<Config>& q, uint32_t k_lane,
                                                   Hidden hidden, int first_key, const float (&scale)[Config::kRows],
                                                   LogScores<Config>& log_scores) {
  int32_t scores[1][Config::kNFragments][4];
  compute_scores<Config, M>(q, k_lane, scores);
#pragma unroll
  for (int n = 0; n < Config::kNFragments; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) log_scores[n][i] = (__int_as_float(scores[0][n][i]) - Config::kMagic) * scale[2 * M + i / 2];
  }
  if (hidden == Hidden::kNothing) return;
  const Place<Config> place(tile, M, first_key);
  hide_past_end<Config>(p, tile, place, log_scores);
  if (hidden == Hidden::kByMask) add_mask<Config>(p, tile, place, log_scores);
}

}  // namespace sage
