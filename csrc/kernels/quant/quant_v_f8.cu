// V -> e4m3, transposed, in one pass and one launch: a scale for each channel of a block of 64 keys, chosen so that sums of
// products with P fit FP16. Optionally less an estimate of V's mean, which attention adds again: the rows of P sum to one.
#include "kernels/ptx/float8.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/quant/kv_tile.cuh"
#include "kernels/quant/quant_v_f8.h"
#include "kernels/swizzle.cuh"

namespace sage {

struct Config : QuantVF8 {
  using Element = SAGE_DTYPE;
  static constexpr int kHeadDim = SAGE_HEAD_DIM;
  static constexpr int kPairs = kHeadDim / 2;       // of channels
  static constexpr int kChunks = kBlockN / 16;      // of keys
  static constexpr int kThreadsPerKey = kHeadDim / 8;
  static constexpr int kKeysPerPass = kThreads / kThreadsPerKey;
  static constexpr float kLargest = 4.5f;           // that |V| becomes: mma_sync/config.cuh says why
};

// Keys of a chunk of 16, of two channels, less the mean.
__device__ __forceinline__ void read_chunk(const uint32_t (&keys)[Config::kBlockN][Config::kPairs + 1], int first,
                                           int keys_left, int pair, float2 mean, float (&low)[16], float (&high)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 x = Pair<Config::Element>::unpack(keys[first + i][pair]);
    low[i] = first + i < keys_left ? x.x - mean.x : 0.0f;
    high[i] = first + i < keys_left ? x.y - mean.y : 0.0f;
  }
}

__device__ __forceinline__ float largest(const float (&x)[16]) {
  float magnitude = 1e-30f;  // keeps the scale of zeros positive
#pragma unroll
  for (int i = 0; i < 16; ++i) magnitude = ptx::max_nan(magnitude, fabsf(x[i]));
  return magnitude;
}

__device__ __forceinline__ void store_chunk(uint8_t* block, int channel, int chunk, const float (&x)[16], float factor) {
  uint32_t bits[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    bits[i] = ptx::pack_e4m3x4(x[2 * i] * factor, x[2 * i + 1] * factor, x[8 + 2 * i] * factor, x[9 + 2 * i] * factor);
  }
  *reinterpret_cast<uint4*>(block + swizzled<Config::kBlockN>(channel, chunk)) = make_uint4(bits[0], bits[1], bits[2], bits[3]);
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, 2)
    quant_v_f8(const __grid_constant__ Config::Params p) {
  __shared__ uint32_t keys[Config::kBlockN][Config::kPairs + 1];
  __shared__ float magnitudes[Config::kChunks][Config::kHeadDim];
  __shared__ float mean[Config::kHeadDim];
  ptx::grid_dependency_launch();

  const KvTile tile(p.cu_seqlens, p.sequences, p.kv_heads, p.kv_len, Config::kTileN);
  if (tile.first_key < tile.length) {
    if (p.v_mean != nullptr) {
      sampled_mean<Config::kSampledKeys, Config::Element, Config::kHeadDim, Config::kThreads>(p.v, tile, p.head_dim, mean);
      if (tile.first_key == 0 && threadIdx.x < Config::kHeadDim) {
        p.v_mean[tile.mean * Config::kHeadDim + threadIdx.x] = mean[threadIdx.x];
      }
    } else if (threadIdx.x < Config::kHeadDim) {
      mean[threadIdx.x] = 0.0f;
    }
#pragma unroll 1
    for (int block = 0; block < Config::kTileN / Config::kBlockN; ++block) {
      const int keys_left = tile.length - tile.first_key - block * Config::kBlockN;
      const int64_t block_index = tile.index * (Config::kTileN / Config::kBlockN) + block;
      uint8_t* out = p.v_f8 + block_index * Config::kBlockN * Config::kHeadDim;
      __syncthreads();
#pragma unroll
      for (int first = 0; first < Config::kBlockN; first += Config::kKeysPerPass) {
        const int key = first + threadIdx.x / Config::kThreadsPerKey;
        const int channel = threadIdx.x % Config::kThreadsPerKey * 8;
        const int64_t token = tile.first_token + min(tile.first_key + block * Config::kBlockN + key, tile.length - 1);
        uint32_t bits[4];
        load_channels<8>(bits, row_pointer<Config::Element>(p.v, tile.batch, tile.head, token), channel, p.head_dim,
                         p.v.aligned16);
#pragma unroll
        for (int i = 0; i < 4; ++i) keys[key][channel / 2 + i] = bits[i];
      }
      __syncthreads();
      float low[16], high[16];
#pragma unroll 1
      for (int task = threadIdx.x; task < Config::kChunks * Config::kPairs; task += Config::kThreads) {
        const int pair = task % Config::kPairs, chunk = task / Config::kPairs;
        read_chunk(keys, chunk * 16, keys_left, pair, reinterpret_cast<const float2*>(mean)[pair], low, high);
        magnitudes[chunk][pair * 2] = largest(low);
        magnitudes[chunk][pair * 2 + 1] = largest(high);
      }
      __syncthreads();
#pragma unroll 1
      for (int task = threadIdx.x; task < Config::kChunks * Config::kPairs; task += Config::kThreads) {
        const int pair = task % Config::kPairs, chunk = task / Config::kPairs;
        read_chunk(keys, chunk * 16, keys_left, pair, reinterpret_cast<const float2*>(mean)[pair], low, high);
        float magnitude[2] = {1e-30f, 1e-30f};
#pragma unroll
        for (int i = 0; i < Config::kChunks; ++i) {
          magnitude[0] = ptx::max_nan(magnitude[0], magnitudes[i][pair * 2]);
          magnitude[1] = ptx::max_nan(magnitude[1], magnitudes[i][pair * 2 + 1]);
        }
        store_chunk(out, pair * 2, chunk, low, Config::kLargest / magnitude[0]);
        store_chunk(out, pair * 2 + 1, chunk, high, Config::kLargest / magnitude[1]);
        if (chunk == 0) {
          reinterpret_cast<float2*>(p.v_scale + block_index * Config::kHeadDim)[pair] =
              make_float2(magnitude[0] / Config::kLargest, magnitude[1] / Config::kLargest);
        }
      }
    }
  }
  // It may run beside quant_k_int8, which it does not need; but attention, which waits for this one, needs both.
  ptx::grid_dependency_wait();
}

}  // namespace sage
