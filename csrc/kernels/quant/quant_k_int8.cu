// K -> INT8, smoothed, in one pass and one launch. A block of threads handles a tile of 128 keys of one head: it estimates
// the mean of K from a sample of keys (each block reads the same sample, so all agree), subtracts it, and scales each group
// of 16 keys by its largest magnitude.
#include "kernels/element.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/quant/quant_k_int8.h"
#include "kernels/swizzle.cuh"

namespace sage {

struct Config : QuantKInt8 {
  using Element = SAGE_DTYPE;
  static constexpr int kHeadDim = SAGE_HEAD_DIM;
  static constexpr int kThreadsPerKey = 16;
  static constexpr int kChannels = kHeadDim / kThreadsPerKey;  // per thread
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kSamplesPerPass = kThreads / kThreadsPerKey;
  // Half of the threads take the tile's first block, half its second, eight keys a pass. So a warp sees two neighbouring
  // keys in each pass, the same pair modulo 8 every time: exactly one scale group.
  static constexpr int kPasses = kBlockN / 8;
  static_assert(kThreads / 2 / kThreadsPerKey == 8 && kWarps == 2 * kGroups);
};

// Estimates K's mean, into mean[channel].
__device__ __forceinline__ void sampled_mean(const Config::Params& p, int batch, int head,
                                             float (&mean)[Config::kHeadDim]) {
  __shared__ float partial[Config::kWarps][Config::kHeadDim];
  constexpr int kPasses = Config::kSampledKeys / Config::kSamplesPerPass;
  const int channel = threadIdx.x % Config::kThreadsPerKey * Config::kChannels;
  const int samples = min(p.kv_len, Config::kSampledKeys);
  uint32_t bits[kPasses][Config::kChannels / 2];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int sample = pass * Config::kSamplesPerPass + threadIdx.x / Config::kThreadsPerKey;
    const int key = static_cast<int>(static_cast<int64_t>(sample) * p.kv_len / samples);
    // Past the last sample, as past the last channel: zeros.
    load_channels<Config::kChannels>(bits[pass], row_pointer<Config::Element>(p.k, batch, head, min(key, p.kv_len - 1)),
                                     channel, sample < samples ? p.head_dim : 0, p.k.aligned16);
  }
  float sum[Config::kChannels] = {};
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    float x[Config::kChannels];
    unpack<Config::Element>(x, bits[pass]);
#pragma unroll
    for (int i = 0; i < Config::kChannels; ++i) sum[i] += x[i];
  }
#pragma unroll
  for (int i = 0; i < Config::kChannels; ++i) {
    // Lanes 16 apart have the same channels of two keys.
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 16);
    if (threadIdx.x % 32 < 16) partial[threadIdx.x / 32][channel + i] = sum[i];
  }
  __syncthreads();
  if (threadIdx.x < Config::kHeadDim) {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < Config::kWarps; ++warp) total += partial[warp][threadIdx.x];
    mean[threadIdx.x] = total / static_cast<float>(samples);
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, 2)
    quant_k_int8(const __grid_constant__ Config::Params p) {
  using Element = Config::Element;
  constexpr int kChannels = Config::kChannels;
  ptx::grid_dependency_launch();

  const int tiles = Config::tiles(p.kv_len);
  const int tile = blockIdx.x % tiles;
  const int batch_head = blockIdx.x / tiles;
  const int head = batch_head % p.kv_heads;
  const int batch = batch_head / p.kv_heads;
  const int block = threadIdx.x / 128;
  const int row = threadIdx.x % 128 / Config::kThreadsPerKey;  // of the block, in its first pass
  const int first_key = tile * Config::kTileN + block * Config::kBlockN + row;
  const int channel = threadIdx.x % Config::kThreadsPerKey * kChannels;

  uint32_t bits[Config::kPasses][kChannels / 2];
#pragma unroll
  for (int pass = 0; pass < Config::kPasses; ++pass) {
    const int key = min(first_key + pass * 8, p.kv_len - 1);
    load_channels<kChannels>(bits[pass], row_pointer<Element>(p.k, batch, head, key), channel, p.head_dim,
                             p.k.aligned16);
  }

  float shift[kChannels] = {};
  if (p.k_mean != nullptr) {
    __shared__ float mean[Config::kHeadDim];
    sampled_mean(p, batch, head, mean);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) shift[i] = mean[channel + i];
    if (tile == 0 && threadIdx.x < Config::kHeadDim) {
      p.k_mean[static_cast<int64_t>(batch_head) * Config::kHeadDim + threadIdx.x] = mean[threadIdx.x];
    }
  }

  float keys[Config::kPasses][kChannels];
  float magnitude = 1e-30f;  // keeps the scale of an all-zero group positive
#pragma unroll
  for (int pass = 0; pass < Config::kPasses; ++pass) {
    unpack<Element>(keys[pass], bits[pass]);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      keys[pass][i] = first_key + pass * 8 < p.kv_len ? keys[pass][i] - shift[i] : 0.0f;
      magnitude = ptx::max_nan(magnitude, fabsf(keys[pass][i]));
    }
  }
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) {
    magnitude = ptx::max_nan(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, lane));
  }

  const int64_t block_index = (static_cast<int64_t>(batch_head) * tiles + tile) * 2 + block;
  const float inverse = 127.0f / magnitude;
  int8_t* out = p.k_int8 + block_index * Config::kBlockN * Config::kHeadDim;
  int largest_square = 0;
#pragma unroll
  for (int pass = 0; pass < Config::kPasses; ++pass) {
    int8_t* destination = out + swizzled<Config::kHeadDim>(pass * 8 + row, channel / 16) + channel % 16;
    int square = 0;
#pragma unroll
    for (int i = 0; i < kChannels; i += 4) {
      const uint32_t packed = pack_s8x4({keys[pass][i], keys[pass][i + 1], keys[pass][i + 2], keys[pass][i + 3]}, inverse);
      square = __dp4a(static_cast<int>(packed), static_cast<int>(packed), square);
      *reinterpret_cast<uint32_t*>(destination + i) = packed;
    }
#pragma unroll
    for (int lane = Config::kThreadsPerKey / 2; lane > 0; lane /= 2) square += __shfl_xor_sync(0xffffffffu, square, lane);
    largest_square = max(largest_square, square);
  }
  largest_square = max(largest_square, __shfl_xor_sync(0xffffffffu, largest_square, 16));
  if (threadIdx.x % 32 == 0) {
    float* scales = p.k_scale + block_index * Config::kScales + threadIdx.x / 32 % Config::kGroups;
    scales[0] = magnitude / 127.0f;
    scales[Config::kGroups] = magnitude / 127.0f * sqrtf(static_cast<float>(largest_square));
  }
}

}  // namespace sage
