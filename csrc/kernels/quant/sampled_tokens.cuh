// Which tokens stand for all of a tensor's.
#pragma once

#include "kernels/mask/seen_keys.cuh"

namespace sage {

// The token that stands for a stretch of them: one in each of so many equal stretches, at places that the golden ratio spreads. Evenly
// spaced ones of an image would all be of a column or two.
template <int Samples>
__device__ __forceinline__ uint32_t sampled_token(uint32_t sample, int length) {
  if (length <= Samples) return min(static_cast<int>(sample), length - 1);
  // Where the stretch starts, and how far within it, in 2^-32 of all tokens.
  static_assert((Samples & (Samples - 1)) == 0);
  constexpr uint32_t kStretch = (uint64_t{1} << 32) / Samples;
  return __umulhi(sample * kStretch + sample * 0x9e3779b9u / Samples, length);
}

// In shared memory.
template <int Most, int Threads>
struct SeenSample {
  int32_t tokens[Most];
  int32_t counts[Threads];  // of the tiles that a thread counts
};

// Those tokens that `sampled_token` takes where the seen ones alone are counted, however few and wherever these are. By a block of threads;
// returns how many are seen.
template <int Samples, int Most, int Threads>
__device__ __forceinline__ int sample_seen(const SeenByQueries& seen, int keys, SeenSample<Most, Threads>& sample) {
  static_assert(Samples <= Most && Samples <= Threads);
  const int tiles = (keys + SeenKeys::kKeys - 1) / SeenKeys::kKeys;
  const int tiles_of_thread = (tiles + Threads - 1) / Threads;
  const int index = threadIdx.x, first = index * tiles_of_thread;
  int count = 0;
#pragma unroll 1
  for (int tile = first; tile < min(tiles, first + tiles_of_thread); ++tile) count += seen.count(tile);
  sample.counts[index] = count;
  __syncthreads();
  int all = 0;
#pragma unroll 1
  for (int i = 0; i < Threads; ++i) all += sample.counts[i];
  if (index < Samples && all > 0) {
    int rank = sampled_token<Samples>(index, all), thread = 0;
#pragma unroll 1
    for (; rank >= sample.counts[thread]; ++thread) rank -= sample.counts[thread];
    int tile = thread * tiles_of_thread;
#pragma unroll 1
    for (; rank >= seen.count(tile); ++tile) rank -= seen.count(tile);
    sample.tokens[index] = seen.key(tile, rank);
  } else if (index < Samples) {
    sample.tokens[index] = 0;
  }
  __syncthreads();
  return all;
}

}  // namespace sage
