// Which keys a block of threads quantises, and the mean of a sample of their tokens.
#pragma once

#include "kernels/element.cuh"
#include "kernels/sequences.cuh"

namespace sage {

struct KvTile {
  int batch;           // of the tensor: 0 where sequences are packed
  int head;
  int first_key;       // of the batch element or sequence
  int length;          // of it
  int64_t first_token; // where it starts
  int64_t index;       // of this tile among all of the quantised tensor's
  int64_t mean;        // index of its mean

  // `heads`, `length` and the grid are those of the whole tensor; cu_seqlens is null where it is not packed.
  __device__ __forceinline__ KvTile(const int32_t* cu_seqlens, int sequences, int heads, int tokens, int tile_n) {
    index = blockIdx.x;
    if (cu_seqlens == nullptr) {
      const int tiles = (tokens + tile_n - 1) / tile_n;
      const int batch_head = blockIdx.x / tiles;
      batch = batch_head / heads;
      head = batch_head % heads;
      first_key = blockIdx.x % tiles * tile_n;
      length = tokens;
      first_token = 0;
      mean = batch_head;
    } else {
      const int slots = static_cast<int>(tile_slots(tokens, sequences, tile_n));
      const int slot = blockIdx.x % slots;
      const Sequence sequence = find_sequence(cu_seqlens, sequences, tokens, tile_n, slot);
      batch = 0;
      head = blockIdx.x / slots;
      first_key = (slot - sequence.first_slot) * tile_n;
      length = sequence.length;
      first_token = sequence.first_token;
      mean = static_cast<int64_t>(sequence.index) * heads + head;
    }
  }
};

// Estimates the mean of a tensor's tokens from this many of them, evenly spread, into mean[channel].
template <int SampledTokens, typename Element, int HeadDim, int Threads>
__device__ __forceinline__ void sampled_mean(const TensorView& tensor, const KvTile& tile, int head_dim,
                                             float (&mean)[HeadDim]) {
  constexpr int kThreadsPerToken = 16;
  constexpr int kChannels = HeadDim / kThreadsPerToken;
  constexpr int kPerPass = Threads / kThreadsPerToken;
  constexpr int kPasses = SampledTokens / kPerPass;
  static_assert(Threads >= HeadDim);
  __shared__ float partial[Threads / 32][HeadDim];
  const int channel = threadIdx.x % kThreadsPerToken * kChannels;
  const int samples = min(tile.length, SampledTokens);
  uint32_t bits[kPasses][kChannels / 2];
  const int first_sample = threadIdx.x / kThreadsPerToken;
  const auto* tokens = row_pointer<Element>(tensor, tile.batch, tile.head, tile.first_token);
  const auto sampled = [&](int pass) {
    const int sample = pass * kPerPass + first_sample;
    // sample * length / samples
    const int token = tile.length < SampledTokens ? min(sample, tile.length - 1)
                                                  : sample * (tile.length / SampledTokens) +
                                                        sample * (tile.length % SampledTokens) / SampledTokens;
    return tokens + token * tensor.token_stride;
  };
  load_rows<kChannels>(bits, sampled, channel, head_dim, tensor.aligned16);
  float sum[kChannels] = {};
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    float x[kChannels];
    unpack<Element>(x, bits[pass]);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) sum[i] += pass * kPerPass + first_sample < samples ? x[i] : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kChannels; ++i) {
    // Lanes 16 apart have the same channels of two tokens.
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 16);
    if (threadIdx.x % 32 < 16) partial[threadIdx.x / 32][channel + i] = sum[i];
  }
  __syncthreads();
  if (threadIdx.x < HeadDim) {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < Threads / 32; ++warp) total += partial[warp][threadIdx.x];
    mean[threadIdx.x] = total / static_cast<float>(samples);
  }
  __syncthreads();
}

}  // namespace sage
