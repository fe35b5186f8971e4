// Channels of Q or K that are much larger than others take the 8 bits of all, since rows and keys have scales, not channels: a bias makes such, and what Q has in
// common. In heads that have some, K's channels are divided by powers of two, and Q's multiplied by these, so that both suffer alike from them; then both are rotated
// (rotate.cuh). No score changes.
#pragma once

#include "kernels/ptx/math.cuh"
#include "kernels/quant/kv_span.cuh"
#include "kernels/quant/quant_k_int8.h"

namespace sage {

// 2^exponent, which is none of a subnormal number.
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) * (1 << 23)); }

// A warp's sum of a number of each lane.
__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
  return x;
}

// Rows of Q, of all heads that share a head of K; in shared memory.
template <int HeadDim>
struct SampleOfQ {
  alignas(16) uint32_t rows[QuantKInt8::kSampledRows][HeadDim / 2];  // pairs; zeros where there are no queries
  float inverse[QuantKInt8::kSampledRows];                           // one over head_dim^2 times the row's typical magnitude
};

// Takes the rows. Whether one of this thread's numbers is large. By a block of threads: 16 read a row.
template <typename Element, int HeadDim>
__device__ __forceinline__ bool take_sample_of_q(const QuantKInt8::Params& p, const KvSpan& span, SampleOfQ<HeadDim>& sample) {
  constexpr int kRows = QuantKInt8::kSampledRows;
  static_assert(kRows * 16 == QuantKInt8::kThreads);
  constexpr int kChannels = HeadDim / 16;  // per thread
  const int channel = threadIdx.x % 16 * kChannels;
  const int row = threadIdx.x / 16;
  Sequence queries{0, 0, p.qo_len, 0};
  if (p.cu_seqlens_of_q != nullptr) queries = sequence_at(p.cu_seqlens_of_q, p.sequences, p.qo_len, 1, static_cast<int>(span.mean / p.kv_heads));
  const int token = max(static_cast<int>(sampled_token<kRows>(row * QuantKInt8::kRowStep % kRows, queries.length)), 0);
  const int head = span.head * p.group + row * p.group / kRows;
  uint32_t bits[kChannels / 2];
  load_channels<kChannels>(bits, row_pointer<Element>(p.q, span.batch, head, int64_t{queries.first_token} + token), channel, queries.length == 0 ? 0 : p.head_dim,
                           p.q.aligned16);
  float x[kChannels], sum[1] = {}, largest = 0.0f;
  unpack<Element>(x, bits);
#pragma unroll
  for (int i = 0; i < kChannels; ++i) {
    sum[0] += fabsf(x[i]);
    largest = fmaxf(largest, fabsf(x[i]));
  }
#pragma unroll
  for (int i = 0; i < kChannels / 2; ++i) sample.rows[row][channel / 2 + i] = bits[i];
  return largest * static_cast<float>(p.head_dim) > QuantKInt8::kLargeInQ * sums_of_16_lanes(sum);
}

// The exponents of a head's powers of two. False: it is not to be rotated. The typical size of channels is the squared mean of their square roots, which a few large
// ones hardly move. Of Q the largest number of a channel counts, relative to its row, which has a scale of its own. By a block of threads; the answers are the
// same in every block that asks.
template <typename Element, int HeadDim, int Threads>
__device__ __forceinline__ bool find_factors(int head_dim, SampleOfQ<HeadDim>& of_q, bool large_in_q, const Sample<HeadDim, Threads>& of_k,
                                             int (&powers)[HeadDim]) {
  constexpr int kOfLane = HeadDim / 32;  // channels
  const int lane = threadIdx.x % 32;
  // Each warp sees for itself, all the same: that spares a barrier where there is nothing to be done, which is mostly.
  float k_roots = 0.0f, k_largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    k_roots += ptx::sqrt(of_k.spread[lane + i * 32]);
    k_largest = fmaxf(k_largest, of_k.spread[lane + i * 32]);
  }
  k_roots = sum_of_warp(k_roots);
  const float k_typical = k_roots * k_roots;  // times head_dim^2
  const bool large_in_k = k_largest * static_cast<float>(head_dim * head_dim) > QuantKInt8::kLargeInK * k_typical;
  if (__builtin_expect(!large_in_q && !__any_sync(0xffffffffu, large_in_k), 1)) return false;

  const int own = threadIdx.x / 16;  // row: 16 threads have one
  float root[1] = {};
#pragma unroll
  for (int i = 0; i < HeadDim / 32; ++i) {
    const float2 x = Pair<Element>::unpack(of_q.rows[own][threadIdx.x % 16 * (HeadDim / 32) + i]);
    root[0] += ptx::sqrt(fabsf(x.x)) + ptx::sqrt(fabsf(x.y));
  }
  const float roots = sums_of_16_lanes(root);
  // Of a row that is not finite no number, or zero, which the largest leaves out. All 16 have it.
  of_q.inverse[own] = ptx::divide(1.0f, ptx::max_nan(roots * roots, 1e-30f));
  __syncthreads();
  if (threadIdx.x < 32) {
    const auto channel = [&](int i) { return (i / 2 * 32 + lane) * 2 + i % 2; };  // pairs, 32 apart
    float q_size[kOfLane] = {}, q_roots = 0.0f;
#pragma unroll 4
    for (int row = 0; row < QuantKInt8::kSampledRows; ++row) {
      const float inverse = of_q.inverse[row];
#pragma unroll
      for (int i = 0; i < kOfLane; i += 2) {
        const float2 x = Pair<Element>::unpack(of_q.rows[row][channel(i) / 2]);
        q_size[i] = fmaxf(q_size[i], fabsf(x.x) * inverse);
        q_size[i + 1] = fmaxf(q_size[i + 1], fabsf(x.y) * inverse);
      }
    }
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) q_roots += ptx::sqrt(q_size[i]);
    q_roots = sum_of_warp(q_roots);
    // The rotation makes numbers smaller, of which float16 would lose bits where K's are small: so they are made larger before.
    int lift = 0;
    if constexpr (Pair<Element>::kHalf) {
      const int typical = __float_as_int(ptx::divide(k_typical, static_cast<float>(head_dim * head_dim))) / (1 << 23) - 127;
      lift = min(max(-QuantKInt8::kMostLift - typical, 0), QuantKInt8::kMostLift);
    }
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      // As far above the typical as Q's is below it: then both have the same share of their scales.
      const float ratio = ptx::divide(of_k.spread[channel(i)] * (q_roots * q_roots), k_typical * q_size[i]);
      constexpr float kMost = 1 << 2 * QuantKInt8::kMostPowers;
      const int exponent = __float_as_int(fminf(fmaxf(ratio, 1.0f / kMost), kMost)) / (1 << 23) - 127;
      powers[channel(i)] = ((exponent + 1) >> 1) - lift;
    }
  }
  __syncthreads();
  return true;
}

}  // namespace sage
