// Attention with INT8 QK^T on mma.sync: the kernels of this family are instances of attend(), below.
//
// A block of warps computes 128 rows of the output; a warp owns 32 of them (16 at head_dim 256) and keeps Q (quantised in
// registers, one scale a row), the scores of a few keys and the output in registers. K (INT8, from quant_k_int8) and V (as the
// caller left it, or from quant_v_f8 or quant_v_f16) stream through shared memory, 64 keys a stage, double buffered with cp.async.
#pragma once

#include "kernels/attention/mma_sync/load.cuh"
#include "kernels/attention/mma_sync/quantise_q.cuh"
#include "kernels/attention/mma_sync/softmax.cuh"
#include "kernels/attention/mma_sync/store_out.cuh"
#include "kernels/attention/mma_sync/values.cuh"
#include "kernels/ptx/grid.cuh"

namespace sage {

// Where in a stage a lane's ldmatrix rows of V start: those of 8-bit V, which is transposed, are (channels 0-7, 8-15) x
// (keys 0-15, 16-31); of 16-bit V, read transposed, (keys 0-15) x (channels 0-7, 8-15).
template <typename Config>
__device__ __forceinline__ uint32_t v_offset(int lane) {
  return Config::kKBlockBytes + (Config::kValues == Values::kE4m3
                                    ? swizzled<Config::kVRowBytes>(lane / 16 * 8 + lane % 8, lane / 8 % 2)
                                    : swizzled<Config::kVRowBytes>(lane % 16, lane / 16));
}

template <typename Config>
__device__ __forceinline__ void attend(const AttentionParams& p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  static_assert(sizeof(MmaSyncTile) <= Config::kTileBytes);
  uint32_t shared = ptx::shared_address(memory);
  ptx::keep(shared);  // what is in shared memory is addressed from it; else each time from a special register, which is slow
  auto& tile = *static_cast<MmaSyncTile*>(__cvta_shared_to_generic(shared + Config::kTileOffset));
  int lane = threadIdx.x % 32;
  ptx::keep(lane);  // for the same reason
  if (threadIdx.x < 32) {
    const auto found = MmaSyncTile::find<Config>(p, blockIdx.x);
    if (lane == 0) tile = found;
  }
  __syncthreads();
  if (tile.qo_len == 0) {
    ptx::grid_dependency_wait();  // whoever waits for this kernel waits for those before by it
    return;
  }

  Queries<Config> q;
  quantise_q<Config>(p, tile, q, reinterpret_cast<float*>(memory + Config::kQScaleOffset));

  State<Config> state;
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
    state.base[row] = Config::kNever;
    state.sum[row] = 0.0f;
    if constexpr (Config::kSmooths) ptx::store_shared_float(unsmoothed_sum<Config>(shared, row), 0.0f);
#pragma unroll
    for (int d = 0; d < Config::kOFragments; ++d) {
      state.out[row / 2][d][row % 2 * 2] = 0.0f;
      state.out[row / 2][d][row % 2 * 2 + 1] = 0.0f;
    }
  }

  if constexpr (Config::kTwice) notes_of_lane<Config>(shared) = Notes::at_start(Config::kRows);

  // Where in a stage this lane's ldmatrix rows of K start: matrices are (keys 0-7, 8-15) x (channels 0-15, 16-31).
  const uint32_t k_lane = swizzled<Config::kKRowBytes>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  const uint32_t v_lane = v_offset<Config>(lane);
  const uint32_t q_scale = shared + Config::kQScaleOffset + (threadIdx.x / 32 * Config::kWarpM + lane / 4) * 4;

  Progress progress;
  int block = visible_block(p, tile, 0);
  uint32_t stage = shared;
  if (block < tile.blocks) load<Config>(p, tile, block, shared, stage);
#pragma unroll 1
  while (block < tile.blocks) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // this stage has arrived for all warps, and all have left the other one
    KeyBlock<Config> keys;
    keys.index = block;
    keys.hidden = hidden_of(p, tile, block);
    keys.unsmoothed = Config::kSmooths && ptx::load_shared_float(v_scales<Config>(shared, stage) + Config::kUnsmoothedFlag) != 0.0f;
    const float k_scale = ptx::load_shared_float(k_scales<Config>(shared, stage) + lane % 4 * 4);
#pragma unroll
    for (int row = 0; row < Config::kRows; ++row) keys.scale[row] = k_scale * ptx::load_shared_float(q_scale + row * 32);
    const int next = visible_block(p, tile, block + 1);
    if (next < tile.blocks) load<Config>(p, tile, next, shared, other_stage<Config>(shared, stage));
#pragma unroll 1
    do {
#pragma unroll 1
      for (int key = 0; key < Config::kBlockN; key += Config::kGatherN) {
        Probabilities<Config> probabilities;
        if (!softmax<Config>(p, shared, tile, q, stage + k_lane + key * Config::kKRowBytes, keys, block * Config::kBlockN + key, progress,
                             state, probabilities)) {
          continue;
        }
        const uint32_t v_scale = v_scales<Config>(shared, stage) + lane % 4 * (2 * Config::kVScaleSize);
        if constexpr (Config::kValues == Values::kE4m3) {
          accumulate_f8<Config>(probabilities, stage + v_lane, v_scale, p.kv_heads, state);
        } else {
          accumulate_f16<Config>(probabilities, stage + v_lane + key * Config::kVRowBytes, v_scale, p.kv_heads, state);
        }
      }
    } while (Config::kTwice && progress.pass != Pass::kFirst);
    block = next;
    stage = other_stage<Config>(shared, stage);
  }

  store_out<Config>(p, shared, tile, state);
}

}  // namespace sage
