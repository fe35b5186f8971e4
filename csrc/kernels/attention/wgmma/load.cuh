// Hopper's attention kernel, the warp that loads: it hands out tiles of the output and has the copy engine fetch what they need.
#pragma once

#include "kernels/attention/wgmma/config.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/mbarrier.cuh"

namespace sage {

// The tile of the output that is computed in turns of this parity.
__device__ __forceinline__ Work& work_of(uint32_t parity, const Memory& shared) {
  return *shared.at<Work>(Shared::kTile + parity * Config::kTileBytes);
}

__device__ __forceinline__ int next_tile(const Config::Params& p) {
  int index = 0;
  if (threadIdx.x == 0) index = atomicAdd(p.next_tile, 1);
  return __shfl_sync(0xffffffffu, index, 0);
}

// Tells the warpgroups that compute of the tile with this index, or of the next one that has rows, and fetches its Q; or that
// no tile is left, and returns false.
__device__ __forceinline__ bool hand_out(const Config::Params& p, int index, uint32_t parity, const Memory& shared) {
  ptx::mbarrier_wait(shared.address + Shared::kQEmpty, parity ^ 1);
  for (; index < p.tiles; index = next_tile(p)) {
    const Work work(p, Config::kBlockM, index);
    if (work.qo_len == 0) continue;
    if (threadIdx.x == 0) {
      const uint32_t full = shared.address + Shared::kQFull;
      work_of(parity, shared) = work;
      if constexpr (Config::kPrefetchQ) {
        ptx::mbarrier_arrive_expect(full, Shared::kQBytes);
        ptx::tensor_copy(shared.address + Shared::kQ, p.q_map, 0, work.q_token + work.first_row, work.head, work.batch, full);
      } else {
        ptx::mbarrier_arrive(full);
      }
    }
    __syncwarp();
    return true;
  }
  if (threadIdx.x == 0) {
    work_of(parity, shared).qo_len = 0;
    ptx::mbarrier_arrive(shared.address + Shared::kQFull);
  }
  return false;
}

__device__ __forceinline__ void fetch_k(const Config::Params& p, int64_t block, int stage, uint32_t barrier,
                                        const Memory& shared) {
  ptx::bulk_copy(shared.address + Shared::kK + stage * Config::kKTileBytes, p.k_int8 + block * Config::kKTileBytes,
                 Config::kKTileBytes, barrier);
  ptx::bulk_copy(shared.address + Shared::kKScale + stage * Config::kScaleBytes, p.k_scale + block * QuantKInt8::kScales,
                 Config::kScaleBytes, barrier);
}

__device__ __forceinline__ void fetch_v(const Config::Params& p, const Work& work, int tile, int stage, uint32_t barrier,
                                        const Memory& shared) {
#pragma unroll
  for (int panel = 0; panel < Config::kVPanels; ++panel) {
    ptx::tensor_copy(shared.address + Shared::kV + stage * Config::kVTileBytes + panel * Config::kVPanelBytes, p.v_map,
                     panel * 64, work.kv_token + tile * Config::kTileN, work.kv_head, work.batch, barrier);
  }
}

// The last tile of V of a packed sequence. Behind it lies the next sequence, which must not be multiplied, not even by zero.
__device__ __forceinline__ void fetch_last_v(const Config::Params& p, const Work& work, int tile, int stage, uint32_t parity,
                                             const Memory& shared) {
  const uint32_t barrier = shared.address + Shared::kLastV;
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect(barrier, Config::kVTileBytes);
    fetch_v(p, work, tile, stage, barrier, shared);
  }
  ptx::mbarrier_wait(barrier, parity);
  const int rows = max(0, work.kv_len - tile * Config::kTileN);
#pragma unroll 1
  for (int panel = 0; panel < Config::kVPanels; ++panel) {
    auto* bytes = shared.at<uint8_t>(Shared::kV + stage * Config::kVTileBytes + panel * Config::kVPanelBytes);
#pragma unroll 1
    for (int i = rows * 128 + threadIdx.x * 16; i < Config::kVPanelBytes; i += 32 * 16) *reinterpret_cast<uint4*>(bytes + i) = {};
  }
  ptx::proxy_async_fence();
  __syncwarp();
}

// Hands out tiles, the first being the block's own and each further one what the counter says, and streams their K and V. A
// warp, whose first thread starts the copies.
__device__ __forceinline__ void produce(const Config::Params& p, const Memory& shared) {
  Ring ring;
  uint32_t parity = 0, last_v_parity = 0;
  // Q does not wait for quant_k_int8, as K and the counter do, which packed sequences may need at once.
  if (p.cu_seqlens_q != nullptr) ptx::grid_dependency_wait();
  bool left = hand_out(p, blockIdx.x, parity, shared);
  ptx::grid_dependency_wait();
  while (left) {
    const Work& work = work_of(parity, shared);
    const int tiles = work.key_tiles();
    const bool packed = p.cu_seqlens_q != nullptr;
    for (int tile = 0; tile <= tiles; ++tile, ring.next()) {
      const uint32_t full = shared.address + Shared::kFull + ring.stage * 8;
      ptx::mbarrier_wait(shared.address + Shared::kEmpty + ring.stage * 8, ring.parity ^ 1);
      const bool last = packed && tile == tiles;
      if (last) {
        fetch_last_v(p, work, tile - 1, ring.stage, last_v_parity, shared);
        last_v_parity ^= 1;
      }
      if (threadIdx.x == 0) {
        const bool with_v = tile > 0 && !last;
        ptx::mbarrier_arrive_expect(
            full, (tile < tiles ? Config::kKTileBytes + Config::kScaleBytes : 0) + (with_v ? Config::kVTileBytes : 0));
        if (tile < tiles) fetch_k(p, work.kv_block + tile, ring.stage, full, shared);
        if (with_v) fetch_v(p, work, tile - 1, ring.stage, full, shared);
      }
      // The ring is full, so they compute with this tile's Q already: there is room for the next one's.
      if (tile == min(Config::kStages - 1, tiles)) left = hand_out(p, next_tile(p), parity ^ 1, shared);
    }
    parity ^= 1;
  }
}

}  // namespace sage
