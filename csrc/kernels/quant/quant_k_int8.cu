// K -> INT8, smoothed, in one pass and one launch. A block of threads handles 64 keys of one head: it estimates the mean
// of K from a sample of keys (each block reads the same sample, so all agree), subtracts it, and scales each group of
// 16 keys by its largest magnitude.
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
  static constexpr int kKeysPerPass = kThreads / kThreadsPerKey;
  static constexpr int kPasses = kBlockN / kKeysPerPass;
  // A warp covers two neighbouring keys in each pass, the same pair modulo 8 every time: exactly one scale group.
  static_assert(kKeysPerPass == 8 && kThreads / 32 == kGroups);
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, 4)
    quant_k_int8(const __grid_constant__ Config::Params p) {
  using Element = Config::Element;
  constexpr int kChannels = Config::kChannels;
  ptx::grid_dependency_launch();

  const int kv_blocks = Config::blocks(p.kv_len);
  const int block = blockIdx.x % kv_blocks;
  const int batch_head = blockIdx.x / kv_blocks;
  const int head = batch_head % p.kv_heads;
  const int batch = batch_head / p.kv_heads;
  const int key_in_pass = threadIdx.x / Config::kThreadsPerKey;
  const int channel = threadIdx.x % Config::kThreadsPerKey * kChannels;

  uint32_t bits[Config::kPasses][kChannels / 2];
#pragma unroll
  for (int pass = 0; pass < Config::kPasses; ++pass) {
    const int key = block * Config::kBlockN + pass * Config::kKeysPerPass + key_in_pass;
    const Element* row = row_pointer<Element>(p.k, batch, head, min(key, p.kv_len - 1));
    load_channels<kChannels>(bits[pass], row, channel, p.head_dim, p.k.aligned16);
  }

  float mean[kChannels] = {};
  if (p.k_mean != nullptr) {
    // Neighbouring threads in neighbouring banks.
    const int slot = threadIdx.x % Config::kThreadsPerKey;
    __shared__ float partial[Config::kKeysPerPass][Config::kHeadDim];
    const int samples = min(p.kv_len, Config::kSampledKeys);
    constexpr int kSamplePasses = Config::kSampledKeys / Config::kKeysPerPass;
    uint32_t sample_bits[kSamplePasses][kChannels / 2];
#pragma unroll
    for (int pass = 0; pass < kSamplePasses; ++pass) {
      const int sample = pass * Config::kKeysPerPass + key_in_pass;
      const int key = static_cast<int>(static_cast<int64_t>(sample) * p.kv_len / samples);
      // Past the last sample, as past the last channel: zeros.
      load_channels<kChannels>(sample_bits[pass], row_pointer<Element>(p.k, batch, head, min(key, p.kv_len - 1)),
                               channel, sample < samples ? p.head_dim : 0, p.k.aligned16);
    }
    float sum[kChannels] = {};
#pragma unroll
    for (int pass = 0; pass < kSamplePasses; ++pass) {
      float x[kChannels];
      unpack<Element>(x, sample_bits[pass]);
#pragma unroll
      for (int i = 0; i < kChannels; ++i) sum[i] += x[i];
    }
#pragma unroll
    for (int i = 0; i < kChannels; ++i) partial[key_in_pass][slot + i * Config::kThreadsPerKey] = sum[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
#pragma unroll
      for (int k = 0; k < Config::kKeysPerPass; ++k) mean[i] += partial[k][slot + i * Config::kThreadsPerKey];
      mean[i] /= static_cast<float>(samples);
      if (block == 0 && key_in_pass == 0) {
        p.k_mean[static_cast<int64_t>(batch_head) * Config::kHeadDim + channel + i] = mean[i];
      }
    }
  }

  float keys[Config::kPasses][kChannels];
  float magnitude = 1e-30f;  // keeps the scale of an all-zero group positive
#pragma unroll
  for (int pass = 0; pass < Config::kPasses; ++pass) {
    unpack<Element>(keys[pass], bits[pass]);
    const int key = block * Config::kBlockN + pass * Config::kKeysPerPass + key_in_pass;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      keys[pass][i] = key < p.kv_len ? keys[pass][i] - mean[i] : 0.0f;
      magnitude = ptx::max_nan(magnitude, fabsf(keys[pass][i]));
    }
  }
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) {
    magnitude = ptx::max_nan(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, lane));
  }

  const int64_t block_index = static_cast<int64_t>(batch_head) * kv_blocks + block;
  if (threadIdx.x % 32 == 0) {
    p.k_scale[block_index * Config::kGroups + threadIdx.x / 32] = magnitude / 127.0f;
  }
  const float inverse = 127.0f / magnitude;
  int8_t* out = p.k_int8 + block_index * Config::kBlockN * Config::kHeadDim;
#pragma unroll
  for (int pass = 0; pass < Config::kPasses; ++pass) {
    int8_t* row = out + swizzled<Config::kHeadDim>(pass * Config::kKeysPerPass + key_in_pass, channel / 16) + channel % 16;
#pragma unroll
    for (int i = 0; i < kChannels; i += 4) {
      *reinterpret_cast<uint32_t*>(row + i) =
          pack_s8x4({keys[pass][i], keys[pass][i + 1], keys[pass][i + 2], keys[pass][i + 3]}, inverse);
    }
  }
}

}  // namespace sage
