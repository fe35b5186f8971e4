// Hopper's attention kernel, the warps that feed it: one hands out tiles of the output, one has the copy engine fetch their K, one their V.
#pragma once

#include "kernels/attention/wgmma/config.cuh"
#include "kernels/attention/wgmma/mask.cuh"
#include "kernels/ptx/cluster.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/mbarrier.cuh"

namespace sage {

// The tile that comes next: what the counter says, which the first block of a pair tells the second. A warp; `parity` is that of
// the calls.
__device__ __forceinline__ int next_tile(const Config::Params& p, uint32_t parity, const Memory& shared) {
  const bool first_lane = threadIdx.x % 32 == 0;
  const uint32_t full = shared.address + Shared::kIndexFull, empty = shared.address + Shared::kIndexEmpty;
  int index = 0;
  if (ptx::cluster_rank() == 0) {
    if (first_lane) index = atomicAdd(p.next_tile, 1);
    if (ptx::cluster_size() > 1) {
      ptx::mbarrier_wait(empty, parity ^ 1);
      __syncwarp();
      if (first_lane) ptx::store_at(shared.address + Shared::kIndex, index, full, 1);
    }
  } else {
    if (first_lane) ptx::mbarrier_arrive_expect(full, 4);
    ptx::mbarrier_wait(full, parity);
    index = *shared.at<volatile int32_t>(Shared::kIndex);
    __syncwarp();
    if (first_lane) ptx::mbarrier_arrive_at(ptx::cluster_address(empty, 0));
  }
  return __shfl_sync(0xffffffffu, index, 0);
}

// Describes an item of work to the other warps. False: there is nothing to do. A warp.
template <bool Masked, bool Packed>
__device__ __forceinline__ bool describe(const Config::Params& p, int item, Work& description) {
  if constexpr (!Masked && !Packed) {
    if (threadIdx.x % 32 == 0) description.part = item;  // there, as all that can be: registers are short
#pragma unroll 1
    while (item >= p.tiles) item -= p.parted_tiles;
  }
  const Tile tile(p, p.tile_rows, p.tiles_of_head, item, [] { return Packed; }, ptx::cluster_size() == 1 ? 0 : Config::kBlockM,
                  !Masked && p.first_rows_first);
  if (tile.qo_len == 0) return false;
  if (threadIdx.x % 32 == 0) {
    static_cast<Tile&>(description) = tile;
    if constexpr (!Masked && !Packed) description.take_part(p);
    description.qo_len = min(tile.qo_len, tile.first_row + p.tile_rows);  // the rows beyond are another tile's
    if constexpr (Packed) description.alone = tile.ends_within(Config::kBlockM);
  }
  if constexpr (Masked) {
    __syncwarp();
    const int blocks = SeenTiles(p, description).count();
    if (threadIdx.x % 32 == 0) description.blocks = blocks;
  }
  return true;
}

// Blocks of a cluster fetch a half each of what all of them get, and expect the whole; or the whole, alone.
struct Multicast {
  explicit __device__ __forceinline__ Multicast(bool alone)
      : rank(alone ? 0 : ptx::cluster_rank()),
        blocks(alone ? 1 : ptx::cluster_size()),
        receivers(alone ? 1u << ptx::cluster_rank() : (1u << ptx::cluster_size()) - 1) {}

  int rank, blocks;    // which of how many this one is
  uint16_t receivers;  // a bit for each block
};

// Hands out tiles, the first being the cluster's own and each further one what the counter says: describes each to the other
// warps and fetches its Q, once they have begun with the one before, and so left the tile before that, whose description is overwritten; and
// once few of its keys are left to be fetched, so that a cluster which is busy for long takes no tile that another could begin sooner. A warp.
template <bool Masked, bool Packed>
__device__ __forceinline__ void hand_out(const Config::Params& p, const Memory& shared) {
  const uint32_t full = shared.address + Shared::kQFull;
  uint32_t parities = 0;  // of tiles, and of the counter's answers: one register
  // Q does not wait for quant_k_int8, as K and the counter do, which packed sequences may need at once.
  bool has_waited = Packed;
  if (Packed) ptx::grid_dependency_wait();
  for (int index = ptx::cluster_index(); index < p.items; index = next_tile(p, parities >> 1, shared), parities ^= 2) {
    if (describe<Masked, Packed>(p, index, work_of(parities & 1, shared))) {
      Work& work = work_of(parities & 1, shared);
      if (threadIdx.x % 32 == 0) {
        if constexpr (Config::kKeepQ) {
          work.known_rotated = has_waited && p.rotated != nullptr ? p.rotated[work.kv_mean] : 0;
          ptx::mbarrier_arrive_expect(full, Shared::kQBytes);
#pragma unroll 1
          for (int group = 0, row = static_cast<int>(work.q_token) + work.row<Packed>(0); group < Config::kConsumers; ++group) {
#pragma unroll 1
            for (int panel = 0; panel < Config::kHeadDim / 64; ++panel) {
              ptx::tensor_copy(shared.address + Shared::kQ + panel * Shared::kQPanelBytes + group * Config::kRows * 128, p.q_map, panel * 64,
                               row, work.head, work.batch, full);
            }
            row += Config::kRows * Multicast(Packed && work.alone).blocks;
          }
        } else {
          ptx::mbarrier_arrive(full);
        }
      }
      ptx::keep(parities);  // and no second one for its last bit
      ptx::mbarrier_wait(shared.address + Shared::kQEmpty, parities & 1);
      ptx::mbarrier_wait(shared.address + Shared::kNearEnd, parities & 1);
      parities ^= 1;
    }
    ptx::grid_dependency_wait();
    has_waited = true;
  }
  if (threadIdx.x % 32 == 0) {
    work_of(parities & 1, shared).qo_len = 0;
    ptx::mbarrier_arrive(full);
  }
}

__device__ __forceinline__ void fetch_bytes(const Multicast& multicast, uint32_t destination, const void* source, int bytes, uint32_t barrier) {
  const int own = multicast.blocks == 1 ? bytes : bytes / 2;
  const int offset = multicast.rank * own;
  ptx::bulk_copy_to(multicast.receivers, destination + offset, static_cast<const uint8_t*>(source) + offset, own, barrier);
}

__device__ __forceinline__ void fetch_k_scales(const Config::Params& p, int64_t block, int slot, uint32_t barrier, const Memory& shared) {
  fetch_bytes(Multicast(false), shared.address + Shared::kKScale + slot * Config::kScaleBytes, p.k_scale + block * QuantKInt8::kScales,
              Config::kScaleBytes, barrier);
}

// For this block of threads alone, whose lanes say when they have read them.
__device__ __forceinline__ void fetch_scales_of_stage(const Config::Params& p, int64_t block, int count, int slot, uint32_t barrier, const Memory& shared) {
  ptx::bulk_copy_to(1 << ptx::cluster_rank(), shared.address + Shared::kScaleRing + slot * Config::kScaleStageBytes,
                    p.k_scale + block * QuantKInt8::kScales, count * Config::kScaleBytes, barrier);
}

__device__ __forceinline__ void fetch_k(const Config::Params& p, const Multicast& multicast, int64_t block, int count, int slot, uint32_t barrier,
                                        const Memory& shared) {
  fetch_bytes(multicast, shared.address + Shared::kK + slot * Config::kKBlockBytes, p.k_int8 + block * Config::kKBlockBytes,
              count * Config::kKBlockBytes, barrier);
}

__device__ __forceinline__ void fetch_v(const Config::Params& p, const Multicast& multicast, const Work& work, int block, int slot,
                                        uint32_t barrier, const Memory& shared) {
  ptx::mbarrier_expect(barrier, Config::kVBlockBytes);
#pragma unroll 1
  for (int panel = multicast.rank; panel < Config::kVPanels; panel += multicast.blocks) {
    ptx::tensor_copy_to(multicast.receivers, shared.address + Shared::kV + slot * Config::kVBlockBytes + panel * Config::kVPanelBytes,
                        p.v_map, panel * 64, work.kv_token + block * Config::kBlockN, work.kv_head, work.batch, barrier);
  }
}

// The last block of V of a packed sequence. Behind it lies the next sequence, which must not be multiplied, not even by zero. Each block of a pair
// fetches it alone, since what the other fetched would count on this one's barrier too soon.
__device__ __forceinline__ void fetch_last_v(const Config::Params& p, const Work& work, int block, int slot, uint32_t parity,
                                             const Memory& shared) {
  const uint32_t barrier = shared.address + Shared::kLastV;
  const int lane = threadIdx.x % 32;
  if (lane == 0) {
    fetch_v(p, Multicast(true), work, block, slot, barrier, shared);
    ptx::mbarrier_arrive(barrier);
  }
  ptx::mbarrier_wait(barrier, parity);
  const int rows = max(0, work.kv_len - block * Config::kBlockN);
#pragma unroll 1
  for (int panel = 0; panel < Config::kVPanels; ++panel) {
    auto* bytes = shared.at<uint8_t>(Shared::kV + slot * Config::kVBlockBytes + panel * Config::kVPanelBytes);
#pragma unroll 1
    for (int i = rows * 128 + lane * 16; i < Config::kVPanelBytes; i += 32 * 16) *reinterpret_cast<uint4*>(bytes + i) = {};
  }
  ptx::proxy_async_fence();
  __syncwarp();
}

// Which tiles of keys a warp that streams goes through: those that the mask leaves to be seen, or all.
template <bool Masked>
__device__ __forceinline__ auto tiles_of(const Config::Params& p, const Work& work) {
  if constexpr (Masked) return SeenTiles(p, work);
  else return 0;
}

// Streams the stages of the tiles that are handed out: a warp, whose first thread starts the copies, K's or V's. That one acts for all where it
// arrives, or starts what others will answer by arriving: not before all lanes have seen the phase that they wait for, which one of them might
// miss else, and read what will be overwritten. `fetch` is told the tile's description, its tiles of keys and their number, a stage's first and the slot
// where that one lies, and the stage's barrier.
template <bool Masked, typename Fetch>
__device__ __forceinline__ void stream(const Config::Params& p, const Memory& shared, const Fetch& fetch) {
  const bool first_lane = threadIdx.x % 32 == 0;
  Stages ring;
  for (uint32_t parity = 0;; parity ^= 1) {
    ptx::mbarrier_wait(shared.address + Shared::kQFull, parity);
    Work& work = work_of(parity, shared);
    if (work.qo_len == 0) return;
    ptx::mbarrier_arrive(shared.address + Shared::kQEmpty);
    const int blocks = work.key_blocks();
    auto seen = tiles_of<Masked>(p, work);
    for (int first = 0; first <= blocks; first += Config::kStageBlocks, ring.next()) {
      const uint32_t full = shared.address + Shared::kFull + ring.place * 8;
      ptx::mbarrier_wait(shared.address + Shared::kEmpty + ring.place * 8, ring.parity ^ 1);
      __syncwarp();
      fetch(work, seen, blocks, first, ring.place * Config::kStageBlocks, full);
      if (first_lane) ptx::mbarrier_arrive(full);
    }
  }
}

template <bool Masked, bool Packed>
__device__ __forceinline__ void load_k(const Config::Params& p, const Memory& shared) {
  const bool first_lane = threadIdx.x % 32 == 0;
  ptx::grid_dependency_wait();
  uint32_t scale_stage = 0;  // of all that were filled
  stream<Masked>(p, shared, [&](Work& work, auto& seen, int blocks, int first, int slot, uint32_t full) {
    if (first == max(0, blocks - Config::kTakenAhead) / Config::kStageBlocks * Config::kStageBlocks && first_lane) {
      ptx::mbarrier_arrive(shared.address + Shared::kNearEnd);
    }
    // A last stage of V alone, or one that each block of a pair fetches alone, gets scales once more, which nobody reads: what is full in one block then
    // tells that both have seen it empty, and nobody arrives at a barrier whose last phase has not been waited for, as the PTX ISA asks.
    const int count = min(Config::kStageBlocks, blocks - first);
    const bool tells = count == 0 || (Packed && ptx::cluster_size() > 1 && work.alone);
    if (first_lane) {
      ptx::mbarrier_expect(full, count * (Config::kKBlockBytes + Config::kScaleBytes) + (tells ? Config::kScaleBytes : 0));
      if (tells) fetch_k_scales(p, work.kv_block, slot, full, shared);
    }
    if constexpr (Masked) {
#pragma unroll 1
      for (int end = slot + count; slot < end; ++slot) {
        const SeenTile next = seen.next();
        if (!first_lane) continue;
        *shared.at<SeenTile>(Shared::kSeen + slot * Config::kSeenBytes) = next;
        fetch_k(p, Multicast(false), work.kv_block + next.tile, 1, slot, full, shared);
        fetch_k_scales(p, work.kv_block + next.tile, slot, full, shared);
      }
    } else {
      // Lanes leave the ring of scales by halves. Whether the other half was left is asked before this one's last stage: then this one cannot have been
      // left yet, and a parity tells one phase from the next alone.
      constexpr uint32_t kHalf = Config::kScaleStages / 2;
      if (scale_stage % kHalf == kHalf - 1) ptx::mbarrier_wait(shared.address + Shared::kScalesEmpty, (scale_stage / kHalf + 1) % 2);
      __syncwarp();
      if (first_lane && count > 0) {
        fetch_k(p, Multicast(Packed && work.alone), work.kv_block + first, count, slot, full, shared);
        fetch_scales_of_stage(p, work.kv_block + first, count, scale_stage % Config::kScaleStages, full, shared);
      }
      ++scale_stage;
    }
    if (first == 0 && first_lane) work.rotated = p.rotated != nullptr ? p.rotated[work.kv_mean] : 0;
  });
}

// V does not wait for quant_k_int8, which lets others start when all that was launched before it has ended. A stage holds the blocks of V before
// those of K.
template <bool Masked, bool Packed>
__device__ __forceinline__ void load_v(const Config::Params& p, const Memory& shared) {
  uint32_t last_parity = 0;
  stream<Masked>(p, shared, [&](const Work& work, auto& seen, int blocks, int first, int slot, uint32_t full) {
#pragma unroll 1
    for (int block = first - 1; block < min(first + Config::kStageBlocks - 1, blocks); ++block, ++slot) {
      if (block < 0) continue;
      int tile = block;
      if constexpr (Masked) tile = seen.next().tile;
      if (Packed && block == blocks - 1) {
        fetch_last_v(p, work, block, slot, last_parity, shared);
        last_parity ^= 1;
      } else if (threadIdx.x % 32 == 0) {
        fetch_v(p, Multicast(Packed && work.alone), work, tile, slot, full, shared);
      }
    }
  });
}

}  // namespace sage
