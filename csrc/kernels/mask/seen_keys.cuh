// What quantisation asks of the keys that some query sees.
#pragma once

#include "kernels/mask/seen_keys.h"

namespace sage {

// Of a batch element.
struct Seen {
  const uint32_t* words = nullptr;  // null: all are

  Seen() = default;
  __device__ __forceinline__ Seen(const SeenKeys::Words& seen, int batch) : words(seen.data == nullptr ? nullptr : seen.data + batch * seen.batch_stride) {}

  __device__ __forceinline__ uint32_t word(int key) const { return words[key / SeenKeys::kKeys * SeenKeys::kWords + SeenKeys::word(key)]; }
  __device__ __forceinline__ bool operator()(int key) const { return words == nullptr || (word(key) >> SeenKeys::bit(key) & 1) != 0; }
};

struct KeyRange {
  int first, end;
};

// From the first tile that has keys which are seen to the last; all of so many keys, if none has. By a block of threads.
template <int Threads>
__device__ __forceinline__ KeyRange seen_range(const Seen& seen, int keys, KeyRange& tiles_seen) {
  const int tiles = (keys + SeenKeys::kKeys - 1) / SeenKeys::kKeys;
  if (threadIdx.x == 0) tiles_seen = {tiles, 0};
  __syncthreads();
  int first = tiles, end = 0;
  for (int tile = threadIdx.x; tile < tiles; tile += Threads) {
    const uint4 words = reinterpret_cast<const uint4*>(seen.words)[tile];
    if ((words.x | words.y | words.z | words.w) == 0) continue;
    first = min(first, tile);
    end = tile + 1;
  }
  if (end > 0) {
    atomicMin(&tiles_seen.first, first);
    atomicMax(&tiles_seen.end, end);
  }
  __syncthreads();
  if (tiles_seen.end == 0) return {0, keys};
  return {tiles_seen.first * SeenKeys::kKeys, min(keys, tiles_seen.end * SeenKeys::kKeys)};
}

}  // namespace sage
