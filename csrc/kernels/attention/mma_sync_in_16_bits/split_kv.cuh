// Attention of few queries over many keys, by all warps of a block of threads.
//
// A strip is 16 rows of the heads that share K and V. Its keys are parted among the warps of some blocks of threads. Where there are more strips than warps
// that run at once, first ones are a warp's each, which adds nothing up, and what is left for the end is parted, so that it is short.
#pragma once

#include "kernels/attention/mma_sync_in_16_bits/warp.cuh"
#include "kernels/attention/sm80_qk_f16_pv_f16_split_kv.h"
#include "kernels/ptx/cluster.cuh"
#include "kernels/ptx/grid.cuh"

namespace sage {

struct Split : Sm80QkF16PvF16SplitKv {
  static constexpr int kMostWarps = most_warps(SAGE_HEAD_DIM);
  static constexpr int kMostShared = shared_bytes(SAGE_HEAD_DIM);
  static_assert(kBlockN == Config::kBlockN);
};

// Of a block of threads: few where there are strips enough, since what its warps have found is added up when all of them have ended.
__device__ __forceinline__ int warps() { return static_cast<int>(blockDim.x) / 32; }

// Whether each of these warps has a strip of its own.
template <bool kStaged>
__device__ __forceinline__ bool have_own(const Split::Params& p) { return kStaged && static_cast<int>(blockIdx.x) < p.whole_blocks; }

// What a block of threads has, or a warp that has its own: a part of the keys of a strip.
struct Share {
  int part, batch, kv_head;
  int group_rows;   // of all strips of the group
  int first, rows;  // of the strip

  template <bool kStaged>
  static __device__ __forceinline__ Share of(const Split::Params& p, int none) {
    const int index = static_cast<int>(blockIdx.x) + none, whole_blocks = kStaged ? p.whole_blocks : 0;
    const int parted = index - whole_blocks;
    const bool own = have_own<kStaged>(p);
    return {p, own ? 0 : parted % p.parts, own ? index * warps() + static_cast<int>(threadIdx.x) / 32 : whole_blocks * warps() + parted / p.parts};
  }
  // The number of one of its rows among those of all heads, as log-sum-exps lie.
  __device__ __forceinline__ int64_t row_of_all(const Split::Params& p, int row) const {
    return (int64_t{batch} * p.kv_heads + kv_head) * group_rows + first + row;
  }

 private:
  __device__ __forceinline__ Share(const Split::Params& p, int part, int strip) : part(part) {
    group_rows = p.q_heads / p.kv_heads * p.qo_len;
    const int strips = (group_rows + Config::kWarpM - 1) / Config::kWarpM, group = strip / strips;
    batch = group / p.kv_heads;
    kv_head = group % p.kv_heads;
    first = strip % strips * Config::kWarpM;
    rows = min(Config::kWarpM, group_rows - first);
  }
};

// A row of a group (its heads one after the other, each with all queries) as head and query.
struct GroupRow {
  int head, token;

  __device__ __forceinline__ GroupRow(const Split::Params& p, int kv_head, int row)
      : head(kv_head * (p.q_heads / p.kv_heads) + row / p.qo_len), token(row % p.qo_len) {}
};

// Rows lane / 4 of a strip and 8 further; the last one again where there are none.
struct GroupRows {
  const Split::Params& p;
  const Config::Element* q[2];
  const uint8_t* masks[2];
  int tokens[2];

  __device__ __forceinline__ GroupRows(const Split::Params& p, const Share& share) : p(p) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = min(share.first + static_cast<int>(threadIdx.x) % 32 / 4 + i * 8, share.group_rows - 1);
      const GroupRow of_group(p, share.kv_head, row);
      tokens[i] = of_group.token;
      q[i] = row_pointer<Config::Element>(p.q, share.batch, of_group.head, of_group.token);
      masks[i] = mask_row(p.mask, share.batch, of_group.head, of_group.token);
    }
  }
  __device__ __forceinline__ void load_q(uint32_t (&words)[2][4], int piece) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) load_channels<8>(words[i], q[i], piece * 32 + threadIdx.x % 4 * 8, p.head_dim, true);
  }
  __device__ __forceinline__ const uint8_t* mask(int row) const { return masks[row]; }
  __device__ __forceinline__ int last_key(int row) const { return tokens[row]; }
};

// Whether a mask's row hides the keys [begin, end).
template <AttentionMask::Type kType>
__device__ __forceinline__ bool hides(const AttentionMask& mask, const uint8_t* row, int begin, int end) {
  constexpr int kTogether = 4;
#pragma unroll 1
  for (int first = begin; first < end; first += kTogether) {
    const uint8_t* some = row + first * mask.key_stride;
    bool hidden = true;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      hidden = mask_value(kType, some + min(i, end - 1 - first) * static_cast<int32_t>(mask.key_stride)) == -INFINITY && hidden;
    }
    if (!hidden) return false;
  }
  return true;
}

// Of 32 blocks of keys, each `step` keys after the one before, those that a row of a strip sees. A mask may hide most: a cache that is not full yet.
struct SeenBlocks {
  uint32_t origin, step;
  int end;
  uint32_t rest;  // of the blocks: which are still to come

  // A lane looks at a block.
  __device__ __forceinline__ SeenBlocks(const Split::Params& p, const Share& share, uint32_t origin, uint32_t step, int end)
      : origin(origin), step(step), end(end) {
    const uint32_t block = origin + threadIdx.x % 32 * step;
    bool seen = block < static_cast<uint32_t>(end);
    if (p.mask.data != nullptr) {
      // Heads may have the same mask, and queries.
      const int rows = p.mask.head_stride != 0 ? share.rows : p.mask.row_stride != 0 ? min(share.rows, p.qo_len) : 1;
      bool hidden = true;
#pragma unroll 1
      for (int row = rows - 1; row >= 0 && __any_sync(0xffffffffu, seen && hidden); --row) {
        const GroupRow of_group(p, share.kv_head, share.first + row);
        const uint8_t* of_row = mask_row(p.mask, share.batch, of_group.head, of_group.token);
        with_type(p.mask.type, [&](auto type) {
          if (seen && hidden) hidden = hides<type.value>(p.mask, of_row, static_cast<int>(block), min(static_cast<int>(block) + Split::kBlockN, end));
        });
      }
      seen = seen && !hidden;
    }
    rest = __ballot_sync(0xffffffffu, seen);
  }
  __device__ __forceinline__ int next() {
    const int place = __ffs(rest) - 1;
    rest &= rest - 1;
    return place < 0 ? end : static_cast<int>(origin + place * step);
  }
};

// In shared memory: a strip's rows, as far as warps have looked at their keys. The output is that of half of the warps, rows in other banks: less is there
// where there are fewer.
struct Found {
  float largest[Split::kMostWarps][Config::kWarpM], sum[Split::kMostWarps][Config::kWarpM];
  alignas(16) float out[Split::kMostWarps / 2][Config::kWarpM][SAGE_HEAD_DIM + Split::kPadding];
};
static_assert(sizeof(Found) <= Split::kMostShared);

// Calls a function of each four channels that a lane has in registers, and where they lie among a warp's rows.
template <typename Function>
__device__ __forceinline__ void for_channels(Sums& sums, float (&rows)[Config::kWarpM][SAGE_HEAD_DIM + Split::kPadding], const Function& function) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int piece = 0; piece < Config::kPieces; ++piece) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int word = 0; word < 4; word += 2) {
        float(&low)[4] = sums.out[piece][word];
        float(&high)[4] = sums.out[piece][word + 1];
        function(low[row * 2], low[row * 2 + 1], high[row * 2], high[row * 2 + 1],
                 *reinterpret_cast<float4*>(&rows[lane / 4 + row * 8][piece * 32 + lane % 4 * 8 + word * 2]));
      }
    }
  }
}

// Adds up the warps' rows, by halves of them: the first warp gets them.
__device__ __forceinline__ void add_warps(Found& found, Sums& sums) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (lane % 4 == 0) {
      found.largest[warp][row + i * 8] = sums.largest[i];
      found.sum[warp][row + i * 8] = sums.sum[i];
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float largest = -INFINITY;
#pragma unroll
    for (int other = 0; other < Split::kMostWarps; ++other) {
      if (other < warps()) largest = fmaxf(largest, found.largest[other][row + i * 8]);
    }
    const float weight = weight_of(sums.largest[i], largest);
    sums.largest[i] = largest;
#pragma unroll
    for (int piece = 0; piece < Config::kPieces; ++piece) {
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        sums.out[piece][word][i * 2] *= weight;
        sums.out[piece][word][i * 2 + 1] *= weight;
      }
    }
    if (warp > 0) continue;
    sums.sum[i] = 0.0f;
#pragma unroll
    for (int other = 0; other < Split::kMostWarps; ++other) {
      if (other < warps()) sums.sum[i] += found.sum[other][row + i * 8] * weight_of(found.largest[other][row + i * 8], largest);
    }
  }
#pragma unroll 1
  for (int half = warps() / 2; half > 0; half /= 2) {
    if (warp >= half && warp < 2 * half) {
      for_channels(sums, found.out[warp - half], [](float x, float y, float z, float w, float4& to) { to = make_float4(x, y, z, w); });
    }
    __syncthreads();
    if (warp < half) {
      for_channels(sums, found.out[warp], [](float& x, float& y, float& z, float& w, const float4& other) {
        x += other.x;
        y += other.y;
        z += other.z;
        w += other.w;
      });
    }
    __syncthreads();
  }
}

// A strip's rows as a block of a cluster has found them, in its shared memory: behind a row's channels its largest score and its sum.
using Rows = float[Config::kWarpM][SAGE_HEAD_DIM + Split::kPadding];
static_assert(sizeof(Rows) <= Split::kMostShared && Split::kPadding == 4);

// Where a strip's parts are a cluster, each of its blocks adds up some channels of the output: a lane reads a part. The first warp has what its block
// has found.
__device__ __forceinline__ void add_blocks(const Split::Params& p, const Share& share, Sums& sums) {
  using Element = Config::Element;
  Rows& mine = *reinterpret_cast<Rows*>(ptx::dynamic_shared());
  if (threadIdx.x < 32) {
    for_channels(sums, mine, [](float x, float y, float z, float w, float4& to) { to = make_float4(x, y, z, w); });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* behind = mine[threadIdx.x / 4 + i * 8] + SAGE_HEAD_DIM;
      if (threadIdx.x % 4 == 0) *reinterpret_cast<float2*>(behind) = make_float2(sums.largest[i], sums.sum[i]);
    }
  }
  ptx::cluster_sync();
  const int fours = p.v_head_dim / 4, items = share.rows * fours, threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int log2_parts = __ffs(p.parts) - 1, part = thread & (p.parts - 1);
#pragma unroll 1
  for (int item = (share.part * threads + thread) >> log2_parts; item - (thread % 32 >> log2_parts) < items; item += threads) {
    const int some = min(item, items - 1), row = some / fours, channel = some % fours * 4;  // all lanes add up, of whatever
    const auto four = [&](int at) { return ptx::load_at(ptx::cluster_address(ptx::shared_address(&mine[row][at]), part)); };
    const float4 behind = four(SAGE_HEAD_DIM);
    Parts parts;
    parts.add(four(channel), behind.x, behind.y);
    add_of_lanes(parts, 1, p.parts);
    if (part > 0 || item >= items) continue;
    const GroupRow of_group(p, share.kv_head, share.first + row);
    store_channels(row_pointer<Element>(p.out, share.batch, of_group.head, of_group.token) + channel, parts.out, parts.total);
    if (p.lse != nullptr && channel == 0) p.lse[share.row_of_all(p, row)] = log_sum_exp(parts.largest, parts.total, p.level);
  }
  ptx::cluster_sync();  // the other may still be reading
}

// A block of threads. If `kStaged`, K and V come by way of shared memory, behind all warps' Q.
template <bool kStaged>
__device__ __forceinline__ void attend_split_kv(const Split::Params& p) {
  using Element = Config::Element;
  Sums sums;
  int none = 0, end;
  uint32_t begin, step;
  {
    const Share share = Share::of<kStaged>(p, none);
    // Of keys that one of the rows sees.
    const int last = share.first + share.rows - 1;
    const bool of_one_head = share.first / p.qo_len == last / p.qo_len;
    end = !p.causal ? p.kv_len : min(p.kv_len, of_one_head ? last % p.qo_len + 1 : p.qo_len);
    // Blocks in turn, so that what a mask hides is a little of each warp's.
    const bool own = have_own<kStaged>(p);
    begin = own ? 0 : (share.part * warps() + threadIdx.x / 32) * Split::kBlockN;
    step = own ? Split::kBlockN : p.parts * warps() * Split::kBlockN;
  }
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
#pragma unroll 1
  for (uint32_t origin = begin; origin < static_cast<uint32_t>(end); origin += 32 * step) {
    ptx::keep(none);  // so that it is found anew, and takes no registers meanwhile
    const Share share = Share::of<kStaged>(p, none);
    const SeenBlocks keys(p, share, origin, step, end);
    if (keys.rest == 0) continue;
    const KeysOfHead head{p, row_pointer<Element>(p.k, share.batch, share.kv_head, 0), row_pointer<Element>(p.v, share.batch, share.kv_head, 0)};
    const GroupRows rows(p, share);
    if constexpr (kStaged) {
      attend(sums, p, rows, keys, Staged(head, ptx::dynamic_shared() + warps() * Config::kQBytes + threadIdx.x / 32 * 2 * Config::kBlockBytes));
    } else {
      attend(sums, p, rows, keys, FromMemory(head));
    }
  }
#pragma unroll
  for (float& sum : sums.sum) sum = sum_of_quad(sum);
  if (warps() > 1 && !have_own<kStaged>(p)) {
    if constexpr (kStaged || !Config::kAhead) __syncthreads();  // K, V and Q lay there
    add_warps(*reinterpret_cast<Found*>(ptx::dynamic_shared()), sums);
  }
  ptx::keep(none);
#if __CUDA_ARCH__ / 100 == 9  // where it was measured
  if (p.parts > 1 && p.part_out == nullptr) {
    add_blocks(p, Share::of<kStaged>(p, none), sums);
    return;
  }
#endif
  if (threadIdx.x >= 32 && !have_own<kStaged>(p)) return;

  const Share share = Share::of<kStaged>(p, none);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = static_cast<int>(threadIdx.x) % 32 / 4 + i * 8;
    if (row >= share.rows) continue;
    const int64_t of_all = share.row_of_all(p, row);
    if (p.part_out != nullptr) {
      const int64_t to = of_all * p.parts + share.part;
      store_sums(sums, i, p.part_out + to * p.v_head_dim, p.v_head_dim);
      if (threadIdx.x % 4 == 0) *reinterpret_cast<float2*>(p.part_sums + to * 2) = make_float2(sums.largest[i], sums.sum[i]);
      continue;
    }
    const GroupRow of_group(p, share.kv_head, share.first + row);
    store_row(sums, i, row_pointer<Element>(p.out, share.batch, of_group.head, of_group.token), p.v_head_dim);
    if (p.lse != nullptr && threadIdx.x % 4 == 0) p.lse[of_all] = log_sum_exp(sums.largest[i], sums.sum[i], p.level);
  }
}

}  // namespace sage
