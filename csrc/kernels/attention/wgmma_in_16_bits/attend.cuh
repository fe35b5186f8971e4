// Attention in 16 bits on Hopper's wgmma, in one launch: for sequences that are too short to repay quantising K.
//
// Persistent blocks of threads take tiles of the output in turn. One thread has the copy engine fetch each tile's Q, and K and V in blocks of 64 keys, into a
// ring of stages. Two or three warpgroups compute, 64 rows each: while one's products run on the tensor cores others do their softmax, and within each the P V of
// one block of keys runs beside the softmax of the next.
#pragma once

#include "kernels/attention/quad.cuh"
#include "kernels/attention/wgmma/row_sums.cuh"
#include "kernels/attention/wgmma/store_rows.cuh"
#include "kernels/attention/wgmma_in_16_bits/config.cuh"
#include "kernels/attention/wgmma_in_16_bits/mask.cuh"
#include "kernels/element.cuh"
#include "kernels/ptx/bar.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/mbarrier.cuh"
#include "kernels/ptx/setmaxnreg.cuh"
#include "kernels/ptx/shared.cuh"
#include "kernels/ptx/wgmma.cuh"

namespace sage {

// Fetches all that a team reads: a thread. The first stage of a tile holds the first block of K; each other one a block of K and the block of V before it,
// which one step multiplies; the last one V alone.
template <bool kMasked>
__device__ __forceinline__ void load(const Config::Params& p, int team, const Memory& shared) {
  using Shared = sage::Shared<kMasked>;
  Ring<Config::kTiles> tiles;
  Ring<Shared::kStages> stages;
  for (int index = blockIdx.x + team * gridDim.x; index < p.tiles; index += Config::kTeams * gridDim.x, tiles.next()) {
    ptx::mbarrier_wait(shared.barrier(Shared::kQEmpty, tiles.place), tiles.parity ^ 1);
    Tile& tile = shared.tile(Shared::kTile, tiles.place);  // registers are short
    tile = Tile(p, p.tile_rows, p.tiles_of_head, index, [] { return false; });  // by a thread alone, as sequences are not packed
    tile.qo_len = min(tile.qo_len, tile.first_row + p.tile_rows);  // the rows beyond are another tile's
    if constexpr (kMasked) ptx::mbarrier_arrive(shared.barrier(Shared::kDescribed, tiles.place));
    const uint32_t q_full = shared.barrier(Shared::kQFull, tiles.place);
    ptx::mbarrier_arrive_expect(q_full, Shared::kQBytes);
#pragma unroll 1
    for (int group = 0; group < Config::kConsumers; ++group) {
#pragma unroll
      for (int panel = 0; panel < Config::kPanels; ++panel) {
        ptx::tensor_copy(shared.address + Shared::kQ + tiles.place * Shared::kQBytes + panel * Shared::kQPanelBytes + group * Config::kRows * 128,
                         p.q_map, panel * 64, tile.first_row + group * Config::kRows, tile.head, tile.batch, q_full);
      }
    }
#pragma unroll 1
    for (int block = 0; block <= tile.blocks; ++block, stages.next()) {
      const uint32_t full = shared.barrier(Shared::kFull, stages.place);
      ptx::mbarrier_wait(shared.barrier(Shared::kEmpty, stages.place), stages.parity ^ 1);
      ptx::mbarrier_arrive_expect(full, (block == 0 || block == tile.blocks ? 1 : 2) * Config::kBlockBytes);
#pragma unroll
      for (int panel = 0; panel < Config::kPanels; ++panel) {
        const int offset = stages.place * Config::kBlockBytes + panel * Config::kBlockPanelBytes, token = block * Config::kBlockN;
        if (block < tile.blocks) {
          ptx::tensor_copy(shared.address + Shared::kK + offset, p.k_map, panel * 64, token, tile.kv_head, tile.batch, full);
        }
        if (block > 0) {
          ptx::tensor_copy(shared.address + Shared::kV + offset, p.v_map, panel * 64, token - Config::kBlockN, tile.kv_head, tile.batch, full);
        }
      }
    }
  }
  ptx::mbarrier_wait(shared.barrier(Shared::kQEmpty, tiles.place), tiles.parity ^ 1);
  shared.tile(Shared::kTile, tiles.place).qo_len = 0;
  ptx::mbarrier_arrive(shared.barrier(Shared::kDescribed, tiles.place));
}

// What a lane keeps of its two rows (lane / 4 and lane / 4 + 8 of the warp's 16) from block to block of keys.
struct Rows {
  float scale[2];  // of scores to log2 units, or to larger ones
  float base[2];   // in these units, less kLevel: what probabilities are relative to
  float sum[2];    // this lane's columns only
};

// Past the last key and, if causal, past the row.
__device__ __forceinline__ void hide_past_end(bool causal, int kv_len, int first_key, int first_row, Scores& scores) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < Config::kBlockN / 2; ++i) {
    const int key = first_key + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (key >= kv_len || (causal && key > first_row + i / 2 % 2 * 8 + lane / 4)) scores[i] = -INFINITY;
  }
}

// Raises bases that a block's largest scores exceed by more than the headroom. Whether any rises, the same in all lanes; then what was added up
// under the old ones is to be multiplied by `factor`.
__device__ __forceinline__ bool raise_bases(const Scores& scores, Rows& rows, float (&factor)[2]) {
  float largest[2];
  bool exceeded = false;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float score = -INFINITY;
#pragma unroll
    for (int i = row * 2; i < Config::kBlockN / 2; i += 4) score = fmaxf(score, fmaxf(scores[i], scores[i + 1]));
    largest[row] = score * rows.scale[row] - Config::kLevel;
    exceeded |= largest[row] > rows.base[row] + Config::kHeadroom;
  }
  if (!__any_sync(0xffffffffu, exceeded)) return false;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float of_row = max_of_quad(largest[row]);
    const bool rises = of_row > rows.base[row] + Config::kHeadroom;
    // Where scores are beyond measure, one outweighs all others in a larger unit too. Without a branch, as code takes time where calls are short.
    const float smaller = rises ? fminf(ptx::rcp(fabsf(of_row) * (1.0f / Config::kLargestScore)), 1.0f) : 1.0f;
    rows.scale[row] *= smaller;
    const float base = rises ? of_row * smaller : rows.base[row];
    factor[row] = ptx::ex2(rows.base[row] * smaller - base);
    rows.base[row] = base;
    rows.sum[row] *= factor[row];
  }
  return true;
}

// Replaces a block's scores by their unnormalised probabilities. Left to itself the compiler computes all exponents before the first exponential, and the warp
// then waits eight clocks for each: so half of the factors are made to depend on exponentials of two chunks before.
__device__ __forceinline__ void make_probabilities(const Rows& rows, Scores& scores) {
  constexpr int kChunk = 8;  // scores, of both rows
  constexpr int kChunks = Config::kBlockN / 2 / kChunk;
  float scale[kChunks + 2][2];
#pragma unroll
  for (int row = 0; row < 2; ++row) scale[0][row] = scale[1][row] = rows.scale[row];
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int row = 0; row < 2; ++row) scale[chunk + 2][row] = rows.scale[row];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      float& score = scores[chunk * kChunk + i];
      score = ptx::ex2(__fmaf_rn(score, scale[chunk][i / 2 % 2], -rows.base[i / 2 % 2]));
      if (i == 1 || i == 7) scale[chunk + 2][i / 4] = fmaxf(rows.scale[i / 4], -score);
    }
  }
}

// And as wgmma takes them. Those of float16, whose sums of pairs may be too large, are added up as they are, not by row_sums.cuh.
__device__ __forceinline__ void pack(const Scores& scores, Rows& rows, Probabilities& probabilities) {
  using P = Pair<Config::Element>;
#pragma unroll
  for (int i = 0; i < Config::kBlockN / 4; ++i) {
    // Two groups of 8 columns are a 16-key step: registers row, row + 8 of the first, then of the second.
    probabilities[i / 4][i % 4] = P::pack(scores[2 * i], scores[2 * i + 1]);
    if constexpr (Config::kHalfRange) rows.sum[i % 2] += scores[2 * i] + scores[2 * i + 1];
  }
}
__device__ __forceinline__ void rescale(const float (&factor)[2], Output& out) {
#pragma unroll
  for (int i = 0; i < Config::kHeadDim / 2; ++i) out[i] *= factor[i / 2 % 2];
}

template <bool kMasked>
__device__ __forceinline__ void compute(const Config::Params& p, int team, const Memory& shared) {
  using Shared = sage::Shared<kMasked>;
  // The same in all lanes, which the compiler knows of a shuffle's result.
  const auto same = [](int value) { return __shfl_sync(0xffffffffu, value, 0); };
  const int warp = same(static_cast<int>(threadIdx.x) / 32) - team * Config::kConsumers * 4, group = warp / 4, lane = threadIdx.x % 32;
  const ptx::Descriptor q_all = ptx::wgmma_descriptor<128>(shared.address + Shared::kQ + group * Config::kRows * 128);
  const ptx::Descriptor k_all = ptx::wgmma_descriptor<128>(shared.address + Shared::kK);
  const ptx::Descriptor v_all = ptx::wgmma_descriptor_rows_along_n<Config::kBlockPanelBytes>(shared.address + Shared::kV);
  Scores scores;
  Probabilities probabilities;
  Output out;
  Rows rows;
  Ring<Config::kTiles> tiles;
  Ring<Shared::kStages> stages;

  const auto wait_full = [&] { ptx::mbarrier_wait(shared.barrier(Shared::kFull, stages.place), stages.parity); };
  const auto leave_stage = [&] {  // what tensor cores read there this warp has waited for
    __syncwarp();  // no lane may miss a phase
    if (lane == 0) ptx::mbarrier_arrive(shared.barrier(Shared::kEmpty, stages.place));
    stages.next();
  };
  const auto start_qk = [&] {
    ptx::wgmma_hold(scores);
    ptx::wgmma_hold(out);
    ptx::wgmma_fence();
    const ptx::Descriptor q = q_all + tiles.place * (Shared::kQBytes / 16), k = k_all + stages.place * (Config::kBlockBytes / 16);
#pragma unroll
    for (int step = 0; step < Config::kQkSteps; ++step) {
      ptx::wgmma_f32_along_k<Config::Element>(scores, q + step / 4 * (Shared::kQPanelBytes / 16) + step % 4 * 2,
                                              k + step / 4 * (Config::kBlockPanelBytes / 16) + step % 4 * 2, step > 0);
    }
    ptx::wgmma_commit();
  };
  const auto start_pv = [&] {
    const ptx::Descriptor v = v_all + stages.place * (Config::kBlockBytes / 16);
#pragma unroll
    for (int step = 0; step < Config::kPvSteps; ++step) {
      // 16 rows of 128 bytes further.
      ptx::wgmma_f32<Config::Element>(out, probabilities[step], v + step * (16 * 128 / 16));
    }
    ptx::wgmma_commit();
    if constexpr (!Config::kHalfRange) add_to_sums<Config::Element>(probabilities, rows.sum);
  };

  for (;; tiles.next()) {
    ptx::mbarrier_wait(shared.barrier(Shared::kDescribed, tiles.place), tiles.parity);
    const Tile& tile = shared.tile(Shared::kTile, tiles.place);
    const int qo_len = same(tile.qo_len), kv_len = same(tile.kv_len), first_row = same(tile.first_row) + group * Config::kRows;
    if (qo_len == 0) return;
    // Blocks of keys that some row of the tile sees, that some row of this warpgroup sees, and of which all its rows see every key.
    const int all_blocks = same(tile.blocks);
    const int blocks = first_row >= qo_len ? -1 : p.causal ? min(all_blocks, first_row / 64 + 1) : all_blocks;
    const int full_blocks = (p.causal ? min(kv_len, first_row + 1) : kv_len) / Config::kBlockN;
    const int warp_row = first_row + warp % 4 * Config::kWarpRows;
    const MaskOfWarp<kMasked> mask(p, tile, warp_row, qo_len - warp_row, shared, Shared::kMask + warp * Shared::kMaskBytes);
    const float scale_log2 = mask.scale_log2();
    uint32_t seen = 0;
    const auto look = [&](int block) {
      if constexpr (kMasked) seen = mask.look(block, blocks);
    };
    const auto hide = [&](int block) {
      if constexpr (kMasked) mask.apply(seen, block, blocks, scores);
      if (block >= full_blocks) hide_past_end(p.causal, kv_len, block * Config::kBlockN, warp_row, scores);
    };
    if (blocks > 0) {
      if constexpr (kMasked) {
        mask.fetch(0);
        ptx::mbarrier_wait(shared.barrier(Shared::kQFull, tiles.place), tiles.parity);
      }
      wait_full();
      start_qk();
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        rows.scale[row] = scale_log2;
        rows.base[row] = Config::kNever;
        rows.sum[row] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < Config::kHeadDim / 2; ++i) out[i] = 0.0f;
      look(0);
      ptx::wgmma_wait<0>();
      leave_stage();
      ptx::wgmma_hold(scores);
      float factor[2];
      hide(0);
      raise_bases(scores, rows, factor);
      make_probabilities(rows, scores);
      pack(scores, rows, probabilities);
#pragma unroll 1
      for (int block = 1; block < blocks; ++block) {
        wait_full();
        start_qk();
        start_pv();
        look(block);
        ptx::wgmma_wait<1>();
        ptx::wgmma_hold(scores);
        hide(block);
        const bool rises = raise_bases(scores, rows, factor);
        make_probabilities(rows, scores);
        ptx::wgmma_wait<0>();
        ptx::wgmma_hold(out);
        leave_stage();
        if (rises) rescale(factor, out);
        pack(scores, rows, probabilities);
      }
      wait_full();
      ptx::wgmma_hold(out);
      ptx::wgmma_fence();
      start_pv();
      ptx::wgmma_wait<0>();
      ptx::wgmma_hold(out);
      leave_stage();

      float inverse[2];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int token = warp_row + lane / 4 + row * 8;
        const float sum = sum_of_quad(rows.sum[row]);
        inverse[row] = kMasked && sum == 0.0f ? 0.0f : ptx::rcp(sum);  // of a row that sees no key
        if (p.lse != nullptr && lane % 4 == 0 && token < qo_len) {
          const float unit = rows.scale[row] == scale_log2 ? 1.0f : scale_log2 * ptx::rcp(rows.scale[row]);
          p.lse[tile.lse + token] = (rows.base[row] + ptx::lg2(sum)) * unit * static_cast<float>(kLn2);
        }
      }
      // The rows of Q are the output's, once no product of this warpgroup reads them.
      ptx::named_barrier(1 + team * Config::kConsumers + group, 128);
      const int stage = Shared::kQ + tiles.place * Shared::kQBytes + warp * 16 * 128;
      store_rows<Config::Element, Config::kHeadDim>(out, inverse, row_pointer<uint16_t>(p.out, tile.batch, tile.head, warp_row), p.out.token_stride,
                                                    qo_len - warp_row, p.v_head_dim, shared.pointer + stage, shared.address + stage);
      ptx::proxy_async_fence();
    }
    // Other warpgroups may see more keys.
#pragma unroll 1
    for (int block = blocks; block < all_blocks; ++block) {
      wait_full();
      leave_stage();
    }
    ptx::mbarrier_arrive(shared.barrier(Shared::kQEmpty, tiles.place));
  }
}

template <bool kMasked>
__device__ __forceinline__ void attend(const Config::Params& p) {
  using Shared = sage::Shared<kMasked>;
  uint8_t* unaligned = ptx::dynamic_shared();
  // Warps of a team compute, and a thread of a warp of its own loads for it.
  constexpr int kComputing = Config::kTeams * Config::kConsumers * 4;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int team = warp < kComputing ? warp / (Config::kConsumers * 4) : warp - kComputing;
  const int offset = (1024 - ptx::shared_address(unaligned) % 1024) % 1024 + team * Shared::kTeamBytes;
  const Memory shared{unaligned + offset, ptx::shared_address(unaligned) + offset};
  const bool loads = warp >= kComputing && team < Config::kTeams && threadIdx.x % 32 == 0;
  if (loads) {
    for (int tile = 0; tile < Config::kTiles; ++tile) {
      ptx::mbarrier_init(shared.barrier(Shared::kDescribed, tile), 1);
      if constexpr (kMasked) ptx::mbarrier_init(shared.barrier(Shared::kQFull, tile), 1);
      ptx::mbarrier_init(shared.barrier(Shared::kQEmpty, tile), Config::kConsumers * 128);
    }
    for (int stage = 0; stage < Shared::kStages; ++stage) {
      ptx::mbarrier_init(shared.barrier(Shared::kFull, stage), 1);
      ptx::mbarrier_init(shared.barrier(Shared::kEmpty, stage), Config::kConsumers * 4);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  ptx::grid_dependency_wait();
  if (warp < kComputing) {
    ptx::registers_acquire<Config::kRegisters>();
    compute<kMasked>(p, team, shared);
  } else {
    ptx::registers_release<Config::kLoaderRegisters>();
    if (loads) load<kMasked>(p, team, shared);
  }
}

}  // namespace sage
