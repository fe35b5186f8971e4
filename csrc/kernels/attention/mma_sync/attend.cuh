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

// The first block from `block` on that the mask does not hide whole.
__device__ __forceinline__ int visible_block(const AttentionParams& p, const Tile& tile, int block) {
  if (p.mask.data != nullptr) {
    while (block < tile.blocks && tile.mask_tiles[block] == AttentionMask::kEmpty) ++block;
  }
  return block;
}

// Where in a stage a lane's ldmatrix rows of V start: those of 8-bit V, which is transposed, are (channels 0-7, 8-15) x
// (keys 0-15, 16-31); of 16-bit V, read transposed, (keys 0-15) x (channels 0-7, 8-15).
template <typename Config>
__device__ __forceinline__ uint32_t v_offset(int lane) {
  return Config::kKTileBytes + (Config::kValues == Values::kF8
                                    ? swizzled<Config::kVRowBytes>(lane / 16 * 8 + lane % 8, lane / 8 % 2)
                                    : swizzled<Config::kVRowBytes>(lane % 16, lane / 16));
}

template <typename Config>
__device__ __forceinline__ uint32_t other_stage(uint32_t stages, uint32_t stage) {
  return 2 * stages + Config::kStageBytes - stage;
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

  Queries<Config> q;
  // Q is the caller's, but log-sum-exp's shift needs K's mean.
  if (p.lse != nullptr) ptx::grid_dependency_wait();
  load_q<Config>(p, tile, q, reinterpret_cast<float*>(shared + Config::kQScaleOffset));
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

  // Where in a stage this lane's ldmatrix rows of K start: matrices are (keys 0-7, 8-15) x (channels 0-15, 16-31).
  uint32_t k_lane = swizzled<Config::kKRowBytes>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  uint32_t v_lane = v_offset<Config>(lane);
  uint32_t q_scale = stages + Config::kQScaleOffset + (threadIdx.x / 32 * Config::kWarpM + lane / 4) * 4;
  if constexpr (Config::kValues == Values::kF16) {  // with 8-bit V there are no registers for it
    ptx::keep(k_lane);
    ptx::keep(v_lane);
    ptx::keep(q_scale);
  }
  uint32_t kept_scale[Config::kRows];
  if constexpr (Config::kKeepScales) {
    __syncwarp();
#pragma unroll
    for (int row = 0; row < Config::kRows; ++row) {
      kept_scale[row] = __float_as_uint(ptx::load_shared_float(q_scale + row * 32));
      ptx::keep(kept_scale[row]);
    }
  }
  int block = visible_block(p, tile, 0);
  uint32_t stage = stages;
  if (block < tile.blocks) load<Config>(p, tile, block, stage);
  ptx::cp_async_commit();
#pragma unroll 1
  while (block < tile.blocks) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // this stage has arrived for all warps, and all have left the other one
    const float k_scale = p.k_scale[(tile.kv_block + block) * QuantKInt8::kScales + lane % 4];
    // What is to be hidden: by the mask (kMixed), for other reasons, nothing.
    const int masked = p.mask.data != nullptr && tile.mask_tiles[block] == AttentionMask::kMixed ? AttentionMask::kMixed
                       : block >= tile.full_blocks                                               ? AttentionMask::kEmpty
                                                                                                 : AttentionMask::kFull;
    const int next = visible_block(p, tile, block + 1);
    if (next < tile.blocks) load<Config>(p, tile, next, other_stage<Config>(stages, stage));
    ptx::cp_async_commit();
#pragma unroll 1
    for (int key = 0; key < Config::kBlockN; key += Config::kGatherN) {
      Probabilities<Config> probabilities;
#pragma unroll
      for (int chunk = 0; chunk < Config::kGatherN / Config::kChunkN; ++chunk) {
        const int chunk_key = key + chunk * Config::kChunkN;
        Scores<Config> scores;
        compute_scores<Config>(q, stage + k_lane + chunk_key * Config::kKRowBytes, scores);
        float scale[Config::kRows];
#pragma unroll
        for (int row = 0; row < Config::kRows; ++row) {
          scale[row] = k_scale * (Config::kKeepScales ? __uint_as_float(kept_scale[row])
                                                      : ptx::load_shared_float(q_scale + row * 32));
        }
        if (__builtin_expect(masked != AttentionMask::kFull, 0)) {
          const int first_key = block * Config::kBlockN + chunk_key;
          if (masked == AttentionMask::kMixed) {
            mask_scores<Config>(p, tile, first_key, scale, scores);
          } else {
            hide_scores<Config>(p, tile, first_key, scores);
          }
        }
        softmax<Config>(scale, scores, chunk, state, probabilities);
      }
      if constexpr (Config::kValues == Values::kF8) {
        accumulate_f8<Config>(probabilities, (stage + v_lane) ^ key, stage + Config::kVScaleOffset + lane % 4 * 8,
                              p.kv_heads, state);
      } else if constexpr (Config::kSums == Sums::kHalf) {
        accumulate_f16_sums<Config>(probabilities, stage + v_lane + key * Config::kVRowBytes, state);
      } else {
        accumulate_f16<Config>(probabilities, stage + v_lane + key * Config::kVRowBytes, state);
      }
    }
    // Found again rather than held in a register: without a mask it is the next one.
    block = visible_block(p, tile, block + 1);
    stage = other_stage<Config>(stages, stage);
  }

  store_out<Config>(p, tile, state);
}

}  // namespace sage
