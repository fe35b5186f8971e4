// Attention with INT8 QK^T on mma.sync: the kernels of this family are instances of attend(), below.
//
// A block of warps computes 128 rows of the output; a warp owns 32 of them (16 at head_dim 256) and keeps Q (quantised in
// registers, one scale a row), the scores of a few keys and the output in registers. K (INT8, from quant_k_int8) and V (as the
// caller left it, or in e4m3 from quant_v_f8) stream through shared memory, 64 keys a stage, double buffered with cp.async.
#pragma once

#include "kernels/attention/mma_sync/load.cuh"
#include "kernels/attention/mma_sync/scores.cuh"
#include "kernels/attention/mma_sync/values.cuh"
#include "kernels/ptx/grid.cuh"

namespace sage {

template <typename Config>
__device__ __forceinline__ void store_out(const AttentionParams& p, const Tile& tile, const State<Config>& state) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
    float sum = state.sum[row];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    // A row that sees no key is zero.
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    const int token = tile.first_row + threadIdx.x / 32 * Config::kWarpM + row * 8 + lane / 4;
    if (token >= tile.qo_len) continue;

    auto* out = reinterpret_cast<uint16_t*>(p.out.data) + tile.batch * p.out.batch_stride +
                tile.head * p.out.head_stride + (tile.q_token + token) * p.out.token_stride;
#pragma unroll
    for (int d = 0; d < Config::kOTiles; ++d) {
      const int channel = d * 8 + lane % 4 * 2;
      float low = state.out[row / 2][d][row % 2 * 2] * inverse;
      float high = state.out[row / 2][d][row % 2 * 2 + 1] * inverse;
      if (Config::kValues == Values::kF8 && p.v_mean != nullptr && sum != 0.0f) {
        const float* mean = p.v_mean + tile.kv_mean * Config::kHeadDim + channel;
        low += mean[0];
        high += mean[1];
      }
      const uint32_t pair = Pair<typename Config::Element>::pack(low, high);
      if (p.out.aligned16) {
        if (channel < p.v_head_dim) *reinterpret_cast<uint32_t*>(out + channel) = pair;
      } else {
        if (channel < p.v_head_dim) out[channel] = pair;
        if (channel + 1 < p.v_head_dim) out[channel + 1] = pair >> 16;
      }
    }
    if (p.lse != nullptr && lane % 4 == 0) {
      constexpr float kLn2 = 0.6931471805599453f;
      float* lse = p.lse + tile.lse + token;
      const float shift = p.k_mean != nullptr ? *lse : 0.0f;
      *lse = sum == 0.0f ? -INFINITY : (state.base[row] + ptx::lg2(sum) + shift) * kLn2;
    }
  }
}

// The first key, from `key` on, of a block of 64 that the mask does not hide whole.
__device__ __forceinline__ int visible_key(const AttentionParams& p, const Tile& tile, int key) {
  if (p.mask.data != nullptr) {
    while (key < tile.visible_keys && tile.mask_tiles[key / MmaSyncTiles::kBlockN] == AttentionMask::kEmpty) {
      key += MmaSyncTiles::kBlockN;
    }
  }
  return key;
}

template <typename Config>
__device__ __forceinline__ uint32_t other_stage(uint32_t stages, uint32_t stage) {
  return 2 * stages + Config::kStageBytes - stage;
}

// Where in a stage this lane's ldmatrix rows of the keys from `key` on start. Of K, and of 8-bit V, which is transposed, matrices are
// (keys or channels 0-7, 8-15) x (bytes 0-15, 16-31); of 16-bit V, read transposed, (keys 0-15) x (channels 0-7, 8-15).
template <typename Config>
__device__ __forceinline__ uint32_t k_address(uint32_t stage, int key) {
  const int lane = ptx::lane_index();
  return stage + swizzled<Config::kKRowBytes>(lane / 16 * 8 + lane % 8, lane / 8 % 2) +
         key * Config::kKRowBytes;
}

template <typename Config>
__device__ __forceinline__ uint32_t v_address(uint32_t stage, int key) {
  const int lane = ptx::lane_index();
  const uint32_t tile = stage + Config::kKTileBytes;
  if constexpr (Config::kValues == Values::kF8) {
    return (tile + swizzled<Config::kVRowBytes>(lane / 16 * 8 + lane % 8, lane / 8 % 2)) ^ key;
  } else {
    return tile + swizzled<Config::kVRowBytes>(lane % 16, lane / 16) + key * Config::kVRowBytes;
  }
}

template <typename Config>
__device__ __forceinline__ void attend(const AttentionParams& p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  static_assert(sizeof(Tile) <= Config::kTileBytes);
  Tile& tile = *reinterpret_cast<Tile*>(shared + Config::kTileOffset);
  const uint32_t stages = ptx::shared_address(shared);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    const Tile found(p, Config::kBlockM, blockIdx.x);
    if (lane == 0) tile = found;
  }
  __syncthreads();
  if (tile.qo_len == 0) return;

  uint32_t q[Config::kMTiles][Config::kQkSteps][4];
  float* q_scale = reinterpret_cast<float*>(shared + Config::kQScaleOffset);
  // Q is the caller's, but log-sum-exp's shift needs K's mean.
  if (p.lse != nullptr) ptx::grid_dependency_wait();
  load_q<Config>(p, tile, q, q_scale);
  q_scale += threadIdx.x / 32 * Config::kWarpM + lane / 4;
  ptx::grid_dependency_wait();

  State<Config> state;
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
    state.base[row] = Config::kNever;
    state.sum[row] = 0.0f;
#pragma unroll
    for (int d = 0; d < Config::kOTiles; ++d) {
      state.out[row / 2][d][row % 2 * 2] = 0.0f;
      state.out[row / 2][d][row % 2 * 2 + 1] = 0.0f;
    }
  }

  int key = visible_key(p, tile, 0);
  uint32_t stage = stages;
  if (key < tile.visible_keys) load<Config>(p, tile, key / Config::kBlockN, stage);
  ptx::cp_async_commit();
  // As many keys at a time as are gathered for P V; at the first one of a block of 64 the next block's copies are started. What lives through the loop is
  // kept to this: the main loop has no register to spare.
#pragma unroll 1
  while (key < tile.visible_keys) {
    if (Config::kGatherN == Config::kBlockN || key % Config::kBlockN == 0) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // this stage has arrived for all warps, and all have left the other one
      const int next = visible_key(p, tile, key + Config::kBlockN);
      if (next < tile.visible_keys) load<Config>(p, tile, next / Config::kBlockN, other_stage<Config>(stages, stage));
      ptx::cp_async_commit();
    }
    Probabilities<Config> probabilities;
#pragma unroll
    for (int chunk = 0; chunk < Config::kGatherN / Config::kChunkN; ++chunk) {
      const int first_key = key + chunk * Config::kChunkN;
      const int64_t block = tile.kv_block + key / Config::kBlockN;
      const float k_scale = p.k_scale[block * QuantKInt8::kScales + ptx::lane_index() % 4];
      Scores<Config> scores;
      compute_scores<Config>(q, k_address<Config>(stage, first_key % Config::kBlockN), scores);
      // Of zeros the product of the scales could underflow, and 0 * -infinity would not be -infinity.
      float scale[Config::kRows];
#pragma unroll
      for (int row = 0; row < Config::kRows; ++row) scale[row] = ptx::max_nan(q_scale[row * 8] * k_scale, 1e-30f);
      if (p.mask.data != nullptr && tile.mask_tiles[key / Config::kBlockN] == AttentionMask::kMixed) {
        mask_scores<Config>(p, tile, first_key, scale, scores);
      } else if (key >= tile.full_keys) {
        hide_scores<Config>(p, tile, first_key, scores);
      }
      softmax<Config>(scale, scores, chunk, state, probabilities);
    }
    if constexpr (Config::kValues == Values::kF8) {
      accumulate_f8<Config>(probabilities, v_address<Config>(stage, key % Config::kBlockN),
                            stage + Config::kVScaleOffset + ptx::lane_index() % 4 * 8, state);
    } else if constexpr (Config::kSums == Sums::kHalf) {
      accumulate_f16_sums<Config>(probabilities, v_address<Config>(stage, key % Config::kBlockN), state);
    } else {
      accumulate_f16<Config>(probabilities, v_address<Config>(stage, key % Config::kBlockN), state);
    }
    key += Config::kGatherN;
    if (Config::kGatherN == Config::kBlockN || key % Config::kBlockN == 0) {
      stage = other_stage<Config>(stages, stage);
      key = visible_key(p, tile, key);
    }
  }

  store_out<Config>(p, tile, state);
}

}  // namespace sage
