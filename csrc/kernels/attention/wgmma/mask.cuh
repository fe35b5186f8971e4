// Hopper's attention kernel under a mask: which tiles of keys are loaded, and what is hidden or added in those.
#pragma once

#include "kernels/attention/wgmma/config.cuh"
#include "kernels/attention/wgmma/softmax.cuh"
#include "kernels/ptx/cluster.cuh"
#include "kernels/ptx/ldmatrix.cuh"
#include "kernels/ptx/mbarrier.cuh"

namespace sage {

// What a mask says of a tile of keys, in shared memory beside the stage that holds them.
struct SeenTile {
  int tile;    // which it is
  int states;  // AttentionMask::Tile of each warpgroup's rows, two bits each

  __device__ __forceinline__ int state(int group) const { return states >> 2 * group & 3; }
};
static_assert(sizeof(SeenTile) <= Config::kSeenBytes);

// The tiles of 64 keys that some row of a cluster sees, one after the other. A warp, which looks at 32 at a time: a lane has what a tile
// is to each 64 rows.
class SeenTiles {
 public:
  __device__ __forceinline__ SeenTiles(const Config::Params& p, const Work& work) : p_(p), work_(work) { look(); }

  __device__ __forceinline__ int count() {
    int count = 0;
    for (; first_ * Config::kBlockN < work_.kv_len; first_ += 32, look()) count += __popc(left_);
    return count;
  }

  // The next one, as it is to the rows of this block. Hidden from all if there is none.
  __device__ __forceinline__ SeenTile next() {
    while (left_ == 0 && (first_ + 32) * Config::kBlockN < work_.kv_len) {
      first_ += 32;
      look();
    }
    if (left_ == 0) {
      __syncwarp();  // as the shuffle does otherwise: all lanes have read the tile's description before the first one goes on
      return {};
    }
    const int lane = __ffs(left_) - 1;
    left_ &= left_ - 1;
    const uint32_t all = __shfl_sync(0xffffffffu, states_, lane);
    int states = 0;
#pragma unroll
    for (int group = 0; group < Config::kConsumers; ++group) states |= (all >> 2 * Work::place(group) & 3) << 2 * group;
    return {first_ + lane, states};
  }

 private:
  __device__ __forceinline__ void look() {
    const int tile = first_ + threadIdx.x % 32;
    const int rows = work_.qo_len - work_.first_row;
    states_ = 0;
    if (tile * Config::kBlockN < work_.kv_len) {
#pragma unroll 1
      for (int i = 0; i < Config::kConsumers * ptx::cluster_size() && i * 64 < rows; ++i) {
        states_ |= static_cast<uint32_t>(work_.mask_tiles[i * p_.mask.tiles_row_stride + tile]) << 2 * i;
      }
    }
    left_ = __ballot_sync(0xffffffffu, states_ != 0);
  }

  const Config::Params& p_;
  const Work& work_;
  int first_ = 0;
  uint32_t states_ = 0;
  uint32_t left_ = 0;  // lanes whose tiles have not been given out
};

// Fetches what the mask adds in the tiles that are handed out, for one warpgroup after the other, each as soon as it has left what it got
// before. A warp, whose first thread starts the copies.
__device__ __forceinline__ void fetch_added(const Config::Params& p, const Memory& shared) {
  uint32_t parities = 0;  // a bit a warpgroup
  for (uint32_t parity = 0;; parity ^= 1) {
    ptx::mbarrier_wait(shared.address + Shared::kQFull, parity);
    const Work& work = work_of(parity, shared);
    if (work.qo_len == 0) return;
    ptx::mbarrier_arrive(shared.address + Shared::kQEmpty);
    // Of the mask; 0 where it is broadcast.
    const int batch = p.mask.batch_stride == 0 ? 0 : work.batch, head = p.mask.head_stride == 0 ? 0 : work.head;
    SeenTiles seen(p, work);
#pragma unroll 1
    for (int left = work.blocks; left > 0; --left) {
      const SeenTile tile = seen.next();
#pragma unroll 1
      for (int group = 0; group < Config::kConsumers; ++group) {
        if (tile.state(group) != AttentionMask::kAdded) continue;
        const uint32_t full = shared.address + Shared::kAddedFull + group * 8;
        ptx::mbarrier_wait(shared.address + Shared::kAddedEmpty + group * 8, parities >> group & 1 ^ 1);
        parities ^= 1u << group;
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
          ptx::mbarrier_arrive_expect(full, Shared::Masked::kAddedBytes);
          ptx::tensor_copy(shared.address + Shared::kAdded + group * Shared::Masked::kAddedBytes, p.mask_map, tile.tile * Config::kBlockN,
                           p.mask.row_stride == 0 ? 0 : work.row<false>(group), head, batch, full);
        }
      }
    }
  }
}

// Scores of a tile that this thread's rows see, a bit each.
__device__ __forceinline__ uint32_t seen_scores(const Config::Params& p, const Work& work, int group, const SeenTile& seen) {
  const int state = seen.state(group);
  if (state == AttentionMask::kHidden) return 0;
  if (state == AttentionMask::kVisible) return ~0u;
  const int64_t tile = work.mask_tiles - p.mask.tiles + seen.tile + Work::place(group) * p.mask.tiles_row_stride;
  return __ldg(p.mask.bits + tile * MaskTiles::kWords + threadIdx.x % 128);
}

__device__ __forceinline__ void hide(uint32_t seen, Scores& scores) {
#pragma unroll
  for (int i = 0; i < Config::kBlockN / 2; ++i) {
    if (!(seen & 1u << i)) scores[i] = kHiddenScore;
  }
}

// Replaces scores by floats, to which what the mask adds is added: in its own unit, of which 2^x takes `log2` of the row. -infinity
// where it hides.
__device__ __forceinline__ void add_mask(const Config::Params& p, const Memory& shared, int group, uint32_t seen,
                                         float k_scale, const Rows& rows, Scores& scores, float (&log2)[2]) {
  const int lane = threadIdx.x % 32;
  float scale[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    log2[row] = unit_of(row, rows, shared) * static_cast<float>(kLog2E);
    scale[row] = ptx::divide(rows.q_scale[row] * k_scale, log2[row]);
  }
  // As accumulators lie: rows lane / 4 and 8 further of 8 keys, then of the next 8.
  const int row = p.mask.row_stride == 0 ? 0 : threadIdx.x % 128 / 32 * 16 + lane % 16;
  uint32_t first = shared.address + Shared::kAdded + group * Shared::Masked::kAddedBytes + row * 128;
  // Left to itself the compiler reads all of the mask first, for which there are no registers: so where each chunk lies is made to
  // depend on the results of the one before, by bits of them that are none, which it does not know.
  const auto none = static_cast<uint32_t>(p.mask.row_stride >> 63);
#pragma unroll
  for (int chunk = 0; chunk < Config::kBlockN / 16; ++chunk) {
    uint32_t pairs[4];
    ptx::ldmatrix_x4(pairs, first + ((chunk * 2 + lane / 16) ^ row % 8) * 16);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 pair = Pair<Config::Element>::unpack(pairs[i / 2]);
      int32_t& score = scores[chunk * 8 + i];
      const float sum = __fmaf_rn(static_cast<float>(score), scale[i / 2 % 2], i % 2 == 0 ? pair.x : pair.y);
      score = __float_as_int(seen & 1u << (chunk * 8 + i) ? sum : -INFINITY);
    }
#pragma unroll
    for (int i = 4; i < 8; ++i) first += static_cast<uint32_t>(scores[chunk * 8 + i]) & none;
  }
  ptx::mbarrier_arrive(shared.address + Shared::kAddedEmpty + group * 8);
}

// The largest of such, in log2 units.
__device__ __forceinline__ void find_largest_of_floats(const Scores& scores, const float (&log2)[2], float (&largest)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    largest[row] = -INFINITY;
#pragma unroll
    for (int i = row * 2; i < Config::kBlockN / 2; i += 4) {
      largest[row] = fmaxf(largest[row], fmaxf(__int_as_float(scores[i]), __int_as_float(scores[i + 1])));
    }
    largest[row] *= log2[row];
  }
}

// As make_probabilities, of such. Their unit may have become another since.
__device__ __forceinline__ void make_probabilities_of_floats(const Memory& shared, const Rows& rows, Scores& scores, float (&sums)[2]) {
  float log2[2], base[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    log2[row] = unit_of(row, rows, shared) * static_cast<float>(kLog2E);
    sums[row] = -0.0f;  // which the first sum leaves out
    base[row] = fmaxf(rows.base[row], -1e30f);  // where no key has been seen yet: -infinity less -infinity is no number
  }
#pragma unroll
  for (int i = 0; i < Config::kBlockN / 2; ++i) {
    const int row = i / 2 % 2;
    const float probability = ptx::ex2(__fmaf_rn(__int_as_float(scores[i]), log2[row], -base[row]));
    sums[row] += probability;
    scores[i] = __float_as_int(probability);
  }
}

}  // namespace sage
