// K -> INT8, smoothed, in one pass and one launch. A block of threads handles a tile of 128 keys of one head: it estimates
// the mean of K from a sample of keys (each block reads the same sample, so all agree), subtracts it, and scales each group
// of 16 keys by its largest magnitude.
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/quant/kv_tile.cuh"
#include "kernels/quant/quant_k_int8.h"
#include "kernels/swizzle.cuh"

namespace sage {

struct Config : QuantKInt8 {
  using Element = SAGE_DTYPE;
  static constexpr int kHeadDim = SAGE_HEAD_DIM;
  static constexpr int kThreadsPerKey = 16;
  static constexpr int kChannels = kHeadDim / kThreadsPerKey;  // per thread
  static constexpr int kWarps = kThreads / 32;
  // Half of the threads take the tile's first block, half its second, eight keys a pass. So a warp sees two neighbouring
  // keys in each pass, the same pair modulo 8 every time: exactly one scale group.
  static constexpr int kPasses = kBlockN / 8;
  static_assert(kThreads / 2 / kThreadsPerKey == 8 && kWarps == 2 * kGroups);
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kHeadDim <= 128 ? 2 : 1)
    quant_k_int8(const __grid_constant__ Config::Params p) {
  using Element = Config::Element;
  constexpr int kChannels = Config::kChannels;
  ptx::grid_dependency_launch();

  const KvTile tile(p.cu_seqlens, p.sequences, p.kv_heads, p.kv_len, Config::kTileN);
  if (tile.first_key >= tile.length) return;
  const int block = threadIdx.x / 128;
  const int row = threadIdx.x % 128 / Config::kThreadsPerKey;  // of the block, in its first pass
  const int first_key = tile.first_key + block * Config::kBlockN + row;
  const int channel = threadIdx.x % Config::kThreadsPerKey * kChannels;

  uint32_t bits[Config::kPasses][kChannels / 2];
#pragma unroll
  for (int pass = 0; pass < Config::kPasses; ++pass) {
    const int key = min(first_key + pass * 8, tile.length - 1);
    load_channels<kChannels>(bits[pass], row_pointer<Element>(p.k, tile.batch, tile.head, tile.first_token + key), channel,
                             p.head_dim, p.k.aligned16);
  }

  float shift[kChannels] = {};
  if (p.k_mean != nullptr) {
    __shared__ float mean[Config::kHeadDim];
    sampled_mean<Config::kSampledKeys, Element, Config::kHeadDim, Config::kThreads>(p.k, tile, p.head_dim, mean);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) shift[i] = mean[channel + i];
    if (tile.first_key == 0 && threadIdx.x < Config::kHeadDim) {
      p.k_mean[tile.mean * Config::kHeadDim + threadIdx.x] = mean[threadIdx.x];
    }
  }
  // Twice, rather than hold them in float32.
  const auto smoothed = [&](int pass, float (&keys)[kChannels]) {
    unpack<Element>(keys, bits[pass]);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) keys[i] = first_key + pass * 8 < tile.length ? keys[i] - shift[i] : 0.0f;
  };

  float magnitude = 1e-30f;  // keeps the scale of an all-zero group positive
#pragma unroll
  for (int pass = 0; pass < Config::kPasses; ++pass) {
    float keys[kChannels];
    smoothed(pass, keys);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) magnitude = ptx::max_nan(magnitude, fabsf(keys[i]));
  }
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) {
    magnitude = ptx::max_nan(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, lane));
  }

  const int64_t block_index = tile.index * 2 + block;
  const float inverse = 127.0f / magnitude;
  int8_t* out = p.k_int8 + block_index * Config::kBlockN * Config::kHeadDim;
  int largest_square = 0;
#pragma unroll
  for (int pass = 0; pass < Config::kPasses; ++pass) {
    int8_t* destination = out + swizzled<Config::kHeadDim>(pass * 8 + row, channel / 16) + channel % 16;
    float keys[kChannels];
    smoothed(pass, keys);
    int square = 0;
#pragma unroll
    for (int i = 0; i < kChannels; i += 4) {
      const uint32_t packed = pack_s8x4({keys[i], keys[i + 1], keys[i + 2], keys[i + 3]}, inverse);
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
