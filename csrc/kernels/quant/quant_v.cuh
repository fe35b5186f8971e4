// V with a scale for each channel of a block of 64 keys, in one pass: what the formats have in common. Optionally less an estimate of its
// mean, which attention adds again, since the rows of P sum to one.
#pragma once

#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/quant/kv_span.cuh"
#include "kernels/quant/quant_v.h"
#include "kernels/swizzle.cuh"
#include "kernels/transpose.cuh"

namespace sage {

template <typename Kernel>
struct QuantVConfig : Kernel {
  using Element = SAGE_DTYPE;
  static constexpr int kHeadDim = SAGE_HEAD_DIM;
  static constexpr int kThreads = Kernel::threads(kHeadDim);
  static constexpr int kChunks = Kernel::kBlockN / 16;  // of keys
  static constexpr int kBlocks = Kernel::kSpanN / Kernel::kBlockN;
  static constexpr float kSmallest = 1e-24f;  // magnitude: keeps scales of zeros positive
  // A mean that is less than half as large as what differs from it would gain nothing.
  static constexpr float kWorthIt = 0.5f;
  // Nor may it make 64 channels of some key so many times larger than they were: a key that most of P falls on, as an
  // attention sink, would bring its rounding with it.
  static constexpr float kGrowth = 1.2f;
};

// Four lanes, 8 apart, share a chunk of 16 keys.
struct OfChunk {
  template <typename Op>
  __device__ __forceinline__ float operator()(float x, const Op& op) const {
    x = op(x, __shfl_xor_sync(0xffffffffu, x, 8));
    return op(x, __shfl_xor_sync(0xffffffffu, x, 16));
  }
};

// A thread's part of a block: 8 channels of four of a chunk's 16 keys, those of number j of four.
template <typename Config>
struct VPart {
  int chunk;
  int j;
  int channel;

  static __device__ __forceinline__ VPart mine() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return {warp % Config::kChunks, lane / 8, warp / Config::kChunks * 64 + lane % 8 * 8};
  }
  __device__ __forceinline__ int key(int i) const { return Config::key(chunk, j, i); }
  // Which of the four, a bit each, are seen: of the block that starts with `first_key`.
  __device__ __forceinline__ uint32_t seen_keys(const SeenByQueries& seen, int first_key, int length) const {
    uint32_t keys = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) keys |= (first_key + key(i) < length && seen(first_key + key(i)) ? 1u : 0u) << i;
    return keys;
  }
};

template <typename Config>
__device__ __forceinline__ void load_part(const typename Config::Params& p, const KvSpan& span, int first_key, const VPart<Config>& part,
                                          uint32_t (&keys)[4][4]) {
  const auto* v = row_pointer<typename Config::Element>(p.v, span.batch, span.head, span.first_token);
  const auto row = [&](int i) { return v + min(first_key + part.key(i), span.length - 1) * p.v.token_stride; };
  load_rows<8>(keys, row, part.channel, p.head_dim, p.v.aligned16);
}

// Whether subtracting the mean makes some key's channels of this warp kGrowth times larger, of those `kept`.
template <typename Config>
__device__ __forceinline__ bool grows(const uint32_t (&keys)[4][4], const float* mean, uint32_t kept) {
  bool grown = false;
#pragma unroll
  for (int key = 0; key < 4; ++key) {
    constexpr float kSmall = 1.0f / 1024.0f;  // sums of the largest numbers are numbers
    float x[8], before = 0.0f, after = 0.0f;
    unpack<typename Config::Element>(x, keys[key]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      before += fabsf(x[i]) * kSmall;
      after += fabsf(x[i] - mean[i]) * kSmall;
    }
#pragma unroll
    for (int lane = 4; lane > 0; lane /= 2) {
      before += __shfl_xor_sync(0xffffffffu, before, lane);
      after += __shfl_xor_sync(0xffffffffu, after, lane);
    }
    grown |= after > Config::kGrowth * before && (kept >> key & 1) != 0;
  }
  return grown;
}

// The whole of a kernel but for how a part is written: `store(x, part, out)`, x[key][channel] being scaled.
template <typename Config, typename Store>
__device__ __forceinline__ void quantise_v(const typename Config::Params& p, const Store& store) {
  __shared__ float magnitudes[2][Config::kChunks][Config::kHeadDim];
  __shared__ Sample<Config::kHeadDim, Config::kThreads> sample;
  ptx::grid_dependency_launch();

  const KvSpan span(p);
  const auto part = VPart<Config>::mine();
  if (span.first_key < span.length) {
    const SeenByQueries seen(p.seen, span.batch);
    const float* mean = sample.mean + part.channel;
    if (p.v_mean != nullptr) {
      take_sample<Config::kSampledKeys, true, typename Config::Element>(p.v, span, p.head_dim, seen, sample);
      if (threadIdx.x < Config::kHeadDim) {
        float& kept = sample.mean[threadIdx.x];
        // Nor is one kept that is no number or infinite, of which the spread is infinite too.
        if (!(fabsf(kept) > Config::kWorthIt * sample.spread[threadIdx.x])) kept = 0.0f;
        if (span.first_key == 0) p.v_mean[span.mean * Config::kHeadDim + threadIdx.x] = kept;
      }
      __syncthreads();
    }
    [[maybe_unused]] const int apart = Config::first_apart() ? seen.first(span.length) : 0;
    const int blocks = (span.end_key - span.first_key + Config::kSpanN - 1) / Config::kSpanN * Config::kBlocks;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      uint32_t keys[4][4];
      const int first_key = span.first_key + block * Config::kBlockN;
      load_part<Config>(p, span, first_key, part, keys);
      uint32_t kept = part.seen_keys(seen, first_key, span.length);
      if constexpr (Config::first_apart()) {
#pragma unroll
        for (int i = 0; i < 4; ++i) kept &= ~((first_key + part.key(i) == apart ? 1u : 0u) << i);
      }
      const bool smooth = p.v_mean != nullptr && !__syncthreads_or(grows<Config>(keys, mean, kept));
      float x[4][8], magnitude[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) magnitude[i] = Config::kSmallest;
#pragma unroll
      for (int key = 0; key < 4; ++key) {
        unpack<typename Config::Element>(x[key], keys[key]);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          x[key][i] = kept >> key & 1 ? (smooth ? x[key][i] - mean[i] : x[key][i]) : 0.0f;
          magnitude[i] = ptx::max_nan(magnitude[i], fabsf(x[key][i]));
        }
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        magnitude[i] = OfChunk{}(magnitude[i], ptx::max_nan);
        if (threadIdx.x % 32 < 8) magnitudes[block % 2][part.chunk][part.channel + i] = magnitude[i];
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
          magnitude[i] = ptx::max_nan(magnitude[i], magnitudes[block % 2][chunk][part.channel + i]);
        }
      }
      const int64_t index = span.index * Config::kBlocks + block;
      uint8_t* scales = p.v_scale + index * Config::scale_bytes(Config::kScaleSize, Config::kHeadDim);
      const bool writes = part.chunk == 0 && part.j == 0;
      if (threadIdx.x < 4) {
        reinterpret_cast<float*>(scales + Config::kScaleSize * Config::kHeadDim)[threadIdx.x] = p.v_mean != nullptr && !smooth ? 1.0f : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float factor;
        if constexpr (Config::kScaleSize == 1) {
          // The next power of two, as its exponent's bits; of infinity 255, of NaN 256. First 2^kMore too small: the scale itself need not
          // be a float32.
          constexpr int kMore = 5;
          constexpr float kTimes = 1 << kMore;
          const uint32_t exponent = (__float_as_uint(magnitude[i] * (1.0f / (Config::kLargest * kTimes))) + 0x7fffffu) >> 23;
          if (writes) scales[part.channel + i] = exponent < 255 ? exponent + kMore - Config::kUnitExponent : 255;
          factor = exponent < 255 ? __uint_as_float((254 - exponent) << 23) * (1.0f / kTimes) : __uint_as_float(0x7fffffffu);
        } else {
          if (writes) reinterpret_cast<float*>(scales)[part.channel + i] = magnitude[i] * (1.0f / Config::kLargest / Config::kScaleUnit);
          factor = ptx::divide(Config::kLargest, magnitude[i]);
        }
#pragma unroll
        for (int key = 0; key < 4; ++key) x[key][i] *= factor;
      }
      store(x, part, p.v_quantised + index * Config::block_bytes(Config::kHeadDim));
    }
  }
  // It may run beside the kernel before, which it does not need; but attention, which waits for this one, needs both.
  ptx::grid_dependency_wait();
}

}  // namespace sage
