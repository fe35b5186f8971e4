// Attention in FP4 on mma.sync: the frame of mma_sync/attend.cuh, whose tiles, masks and output these kernels share.
//
// A warp keeps Q (less its mean), the scores of 32 keys and the output in registers. K and V (from quant_kv_fp4), with their
// scales and the scores of Q's mean, stream through shared memory, 64 keys a stage, double buffered with cp.async.
#pragma once

#include "kernels/attention/fp4/values.cuh"
#include "kernels/attention/mma_sync/store_out.cuh"
#include "kernels/ptx/grid.cuh"

namespace sage {

__device__ __forceinline__ void attend_fp4(const Config::Params& p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  static_assert(sizeof(Fp4Tile) <= Config::kTileBytes && Config::kThreads / 32 * 4 + 4 <= Config::kMagnitudeBytes);
  uint32_t shared = ptx::shared_address(memory);
  ptx::keep(shared);  // what is in shared memory is addressed from it; else each time from a special register, which is slow
  auto& tile = *static_cast<Fp4Tile*>(__cvta_shared_to_generic(shared + Config::kTileOffset));
  int lane = threadIdx.x % 32;
  ptx::keep(lane);  // for the same reason
  if (threadIdx.x < 32) {
    const auto found = Fp4Tile::find(p, blockIdx.x);
    if (lane == 0) tile = found;
  }
  __syncthreads();
  ptx::grid_dependency_wait();  // for Q's mean, K and V; and where there are no rows, as whoever waits for this kernel waits for those before by it
  if (tile.qo_len == 0) return;

  const ScaleSpread spread = ScaleSpread::mine();
  Fp4Queries q;
  const float q_unit = quantise_q_fp4(p, tile, spread, reinterpret_cast<float*>(memory + Config::kMagnitudeOffset), q);
  ptx::store_shared_float(shared + Config::kQUnitOffset, q_unit);  // where there is room, as there is none in registers
  const uint32_t first_scores = shared + Config::kFirstScoreOffset + (threadIdx.x / 32 * Config::kWarpM + lane / 4) * 4;

  Fp4State state;
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
    if (lane % 4 == 0) ptx::store_shared_float(first_scores + row * 32, -INFINITY);
    state.base[row] = Config::kNever;
#pragma unroll
    for (int i = row % 2 * 2; i < row % 2 * 2 + 2; ++i) {
      state.sums[row / 2][i] = 0.0f;
#pragma unroll
      for (int d = 0; d < Config::kOFragments; ++d) state.out[row / 2][d][i] = 0.0f;
    }
  }

  // Where in a stage this lane's ldmatrix rows start: (keys 0-7, 8-15) x (channels 0-31, 32-63) of K, (channels 0-7, 8-15) x (keys 0-31, 32-63) of V.
  const uint32_t k_lane = swizzled<Config::kKRowBytes>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  uint32_t v_lane = k_lane;
  if constexpr (Config::kVRowBytes != Config::kKRowBytes) v_lane = swizzled<Config::kVRowBytes>(lane / 16 * 8 + lane % 8, lane / 8 % 2);

  int block = visible_block(p, tile, 0);
  uint32_t stage = shared;
  if (block < tile.blocks) load_fp4(tile, block, stage);
#pragma unroll 1
  while (block < tile.blocks) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // this stage has arrived for all warps, and all have left the other one
    Fp4KeyBlock keys;
    keys.hidden = hidden_of(p, tile, block);
    keys.unit = ptx::load_shared_float(shared + Config::kQUnitOffset) * ptx::load_shared_float(stage + Config::kKUnitOffset);
    keys.inverse = __fdividef(1.0f, keys.unit);
    const int next = visible_block(p, tile, block + 1);
    if (next < tile.blocks) load_fp4(tile, next, other_stage<Config>(shared, stage));
    Fp4Probabilities probabilities;
    softmax_fp4(p, tile, q, keys, stage, k_lane, first_scores, block * Config::kBlockN, state, probabilities);
    accumulate_fp4(probabilities, spread, stage, v_lane, p.kv_heads, state);
    block = next;
    stage = other_stage<Config>(shared, stage);
  }

  __syncwarp();  // of each row one lane has written what four read
  add_first_key(p, tile, first_scores, p.kv_heads, state);
  store_rows<Config>(
      p, tile, state.out, state.base, [&](int row) { return state.sums[row / 2][row % 2 * 2]; },
      [&](int row, float) { return state.sums[row / 2][row % 2 * 2 + 1]; });
}

}  // namespace sage
