// Hopper's attention kernel in 16 bits under a mask: each warp fetches what it says of the warp's own rows, a block of keys ahead, and looks at nothing before.
#pragma once

#include "kernels/attention/mask_value.cuh"
#include "kernels/attention/wgmma_in_16_bits/config.cuh"
#include "kernels/element.cuh"
#include "kernels/ptx/cp_async.cuh"
#include "kernels/ptx/ldmatrix.cuh"
#include "kernels/ptx/shared.cuh"
#include "kernels/swizzle.cuh"

namespace sage {

// Nothing is said.
template <bool kMasked>
struct MaskOfWarp {
  float scale;
  __device__ __forceinline__ MaskOfWarp(const Config::Params& p, const Tile&, int, int, const Memory&, int) : scale(p.scale_log2) {}
  __device__ __forceinline__ float scale_log2() const { return scale; }
};

// Of a tile, from the warp's first row on, of which so many are the tile's. What is fetched lies at an offset in the team's shared memory.
template <>
class MaskOfWarp<true> {
 public:
  __device__ __forceinline__ MaskOfWarp(const Config::Params& p, const Tile& tile, int first_row, int rows, const Memory& shared, int offset)
      : p_(p),
        first_(mask_row(p.mask, tile.batch, tile.head, 0) + first_row * p.mask.row_stride),
        rows_(p.mask.row_stride == 0 ? min(rows, 1) : rows),
        address_(shared.address + offset) {}

  // What scores are multiplied by, once a mask's numbers have been added to them.
  __device__ __forceinline__ float scale_log2() const { return is_bool() ? p_.scale_log2 : static_cast<float>(kLog2E); }

  // Begins to fetch what it says of a block of keys. Of what was fetched before all lanes have read theirs.
  __device__ __forceinline__ void fetch(int block) const {
    __syncwarp();
    const uint8_t* first = first_ + int64_t{block * Config::kBlockN} * p_.mask.key_stride;
    const int keys = p_.kv_len - block * Config::kBlockN;
    if (is_bool()) {
      copy_some<1>(first, keys);
    } else {
      copy_some<2>(first, keys);
    }
    ptx::cp_async_commit();
  }

  // A block's scores that are seen, a bit each, of a mask of bools: while products run. Of numbers, two of which would take a register: nothing yet.
  __device__ __forceinline__ uint32_t look(int block, int blocks) const {
    ptx::cp_async_wait<0>();
    __syncwarp();
    if (!is_bool()) return 0;
    const uint32_t seen = seen_scores();
    if (block + 1 < blocks) fetch(block + 1);
    return seen;
  }

  // Hides scores, or adds to them, in units of 1 instead of 1 / sm_scale.
  __device__ __forceinline__ void apply(uint32_t seen, int block, int blocks, Scores& scores) const {
    if (is_bool()) {
      if (!__all_sync(0xffffffffu, seen == ~0u)) hide(seen, scores);
    } else {
      add(scores);
      if (block + 1 < blocks) fetch(block + 1);
    }
  }

 private:
  __device__ __forceinline__ bool is_bool() const { return p_.mask.type == AttentionMask::kBool; }

  // Where a byte of a row lies: of numbers so that ldmatrix reads eight rows at once.
  template <int kSize>
  static __device__ __forceinline__ int place(int row, int byte) {
    constexpr int kRowBytes = Config::kBlockN * kSize;
    return kSize == 1 ? row * kRowBytes + byte : swizzled<kRowBytes>(row, byte / 16) + byte % 16;
  }

  // kTogether bytes of a row at once, of the last keys those that there are; or where keys lie anyhow as many elements of kSize as are 4 bytes, one by one.
  template <int kSize, int kTogether>
  __device__ __forceinline__ void copy(const uint8_t* first, int keys) const {
    constexpr int kBytes = kTogether == kSize ? 4 : kTogether;
    constexpr int kLanes = Config::kBlockN * kSize / kBytes, kRows = 32 / kLanes;  // of a row; that are copied at once
    const int lane = threadIdx.x % 32, lane_row = lane / kLanes, byte = lane % kLanes * kBytes, left = keys * kSize - byte;
    if (left <= 0) return;
    const uint8_t* from = first + lane_row * p_.mask.row_stride + byte / kSize * p_.mask.key_stride;
#pragma unroll(kTogether == kSize ? 4 : Config::kWarpRows / kRows)
    for (int row = lane_row; row < Config::kWarpRows; row += kRows, from += kRows * p_.mask.row_stride) {
      if (row >= rows_) continue;
      const uint32_t to = address_ + place<kSize>(row, byte);
      if constexpr (kTogether > kSize) {
        ptx::cp_async<kTogether>(to, from, min(left, kTogether));
      } else {
        uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < 4; i += kSize) {
          if (i >= left) continue;
          const uint8_t* element = from + i / kSize * p_.mask.key_stride;
          word |= (kSize == 1 ? uint32_t{*element} : uint32_t{*reinterpret_cast<const uint16_t*>(element)}) << i * 8;
        }
        ptx::store_shared_word(to, word);
      }
    }
  }
  template <int kSize>
  __device__ __forceinline__ void copy_some(const uint8_t* first, int keys) const {
    if (p_.mask_bytes == 16) {
      copy<kSize, 16>(first, keys);
    } else if (p_.mask_bytes == 4) {
      copy<kSize, 4>(first, keys);
    } else {
      copy<kSize, kSize>(first, keys);
    }
  }

  __device__ __forceinline__ int row_of(int row) const { return p_.mask.row_stride == 0 ? 0 : row; }

  // Scores of a block that this lane's two rows see, a bit each: `bit`. A lane looks at 16 neighbouring keys of each; four lanes, which have the same rows, then
  // hand each other those that stand where their scores do.
  __device__ __forceinline__ uint32_t seen_scores() const {
    const int lane = threadIdx.x % 32, key = lane % 4;
    uint32_t words[2][4], some = 0, missing = 0;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      ptx::load_shared_words(words[row], address_ + place<1>(row_of(lane / 4 + row * 8), key * 16));
#pragma unroll
      for (const uint32_t word : words[row]) {
        some |= word;
        missing |= word ^ 0x01010101u;
      }
    }
    if (__all_sync(0xffffffffu, missing == 0)) return ~0u;
    if (__all_sync(0xffffffffu, some == 0)) return 0;
    uint32_t seen = 0;  // of these 16 keys: bit key % 4 * 8 + row * 4 + key / 4
#pragma unroll
    for (int bit = 0; bit < 8; ++bit) {
      const uint32_t word = words[bit / 4][bit % 4];
      const uint32_t seen_bytes = ((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word;  // bit 7 of each that is not 0
      seen |= seen_bytes >> (7 - bit) & 0x01010101u << bit;
    }
    uint32_t mine = 0;
#pragma unroll
    for (int other = 0; other < 4; ++other) {
      const uint32_t keys = __shfl_sync(0xffffffffu, seen, (lane & ~3) | other) >> (key % 2 * 16 + key / 2);
      mine |= (keys & 0x5555u) << (other % 2 + other / 2 * 16);
    }
    return mine;
  }
  static __device__ __forceinline__ constexpr uint32_t bit(int score) {
    const int eight = score / 4;  // keys
    return 1u << (eight / 2 % 2 + eight / 4 * 16 + eight % 2 * 2 + score / 2 % 2 * 4 + score % 2 * 8);
  }
  static __device__ __forceinline__ void hide(uint32_t seen, Scores& scores) {
#pragma unroll
    for (int i = 0; i < Config::kBlockN / 2; ++i) {
      if (!(seen & bit(i))) scores[i] = -INFINITY;
    }
  }

  __device__ __forceinline__ void add(Scores& scores) const {
    const float sm_scale = p_.scale_log2 * static_cast<float>(kLn2);
    // As accumulators lie: rows lane / 4 and 8 further of 8 keys, then of the next 8.
    const int lane = threadIdx.x % 32;
    const uint32_t first = address_ + place<2>(row_of(lane % 16), lane / 16 * 16);
#pragma unroll
    for (int chunk = 0; chunk < Config::kBlockN / 16; ++chunk) {
      uint32_t pairs[4];
      ptx::ldmatrix_x4(pairs, first ^ chunk * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = Pair<Config::Element>::unpack(hidden_to_infinity<Config::Element>(pairs[i]));
        float* some = scores + chunk * 8 + i * 2;
        some[0] = __fmaf_rn(some[0], sm_scale, pair.x);
        some[1] = __fmaf_rn(some[1], sm_scale, pair.y);
      }
    }
  }

  const Config::Params& p_;
  const uint8_t* first_;  // element of the warp's first row
  int rows_;
  uint32_t address_;
};

}  // namespace sage
