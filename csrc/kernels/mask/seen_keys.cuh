// What quantisation asks of the keys that some query sees.
#pragma once

#include "kernels/mask/seen_keys.h"

namespace sage {

// Of a batch element.
struct SeenByQueries {
  const uint32_t* words = nullptr;  // null: all are

  SeenByQueries() = default;
  __device__ __forceinline__ SeenByQueries(const SeenKeys::Words& seen, int batch) : words(seen.data == nullptr ? nullptr : seen.data + batch * seen.batch_stride) {}

  __device__ __forceinline__ uint32_t word(int key) const { return words[key / SeenKeys::kKeys * SeenKeys::kWords + SeenKeys::word(key)]; }
  __device__ __forceinline__ bool operator()(int key) const { return words == nullptr || (word(key) >> SeenKeys::bit(key) & 1) != 0; }

  // The first of `keys` that is seen; 0 if none is. By a whole warp.
  __device__ __forceinline__ int first(int keys) const {
    if (words == nullptr) return 0;
    const int tiles = (keys + SeenKeys::kKeys - 1) / SeenKeys::kKeys;
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile += 32) {
      const int mine = tile + static_cast<int>(threadIdx.x) % 32;
      const uint32_t seen = __ballot_sync(0xffffffffu, mine < tiles && count(mine) > 0);
      if (seen != 0) return key(tile + __ffs(seen) - 1, 0);
    }
    return 0;
  }

  // Only where `words` is not null.
  __device__ __forceinline__ uint4 tile(int index) const { return reinterpret_cast<const uint4*>(words)[index]; }
  __device__ __forceinline__ int count(int index) const {
    const uint4 keys = tile(index);
    return __popc(keys.x) + __popc(keys.y) + __popc(keys.z) + __popc(keys.w);
  }
  // The seen key number `rank` of a tile, from 0.
  __device__ __forceinline__ int key(int index, int rank) const {
    const uint4 keys = tile(index);
    // Four neighbouring keys a nibble, then eight a byte.
    const uint32_t first_fours = keys.x | keys.y << 2, second_fours = keys.z | keys.w << 2;
    const auto bytes = [](uint32_t nibbles) {
      nibbles = (nibbles | nibbles << 8) & 0x00ff00ff;
      return (nibbles | nibbles << 4) & 0x0f0f0f0f;
    };
    const auto half = [&](int shift) { return bytes(first_fours >> shift & 0xffff) | bytes(second_fours >> shift & 0xffff) << 4; };
    const uint32_t low = half(0);
    const bool upper = rank >= __popc(low);
    uint32_t in_order = upper ? half(16) : low;
#pragma unroll 1
    for (int i = upper ? rank - __popc(low) : rank; i > 0; --i) in_order &= in_order - 1;
    return index * SeenKeys::kKeys + (upper ? 32 : 0) + __ffs(in_order) - 1;
  }
};

}  // namespace sage
