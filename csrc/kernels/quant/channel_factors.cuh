// Channels of K that are much larger than others take the 8 bits of all, since keys share scales, not channels: what a bias of K becomes that is rotated
// is such. So K is divided by a power of two there, and Q multiplied by it: no score changes.
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

// A block of threads' sum of a number of each.
template <int Warps>
__device__ __forceinline__ float sum_of_block(float x, float (&of_warps)[Warps]) {
  x = sum_of_warp(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0.0f;
#pragma unroll
  for (int i = 0; i < Warps; ++i) x += of_warps[i];
  return x;
}

// The exponents of a head's powers of two. False: all are 0. `sample` is K's, with its spread. The typical size of channels is the squared mean of their square roots, which a few
// large ones hardly move. Of 64 rows of Q, of all heads that share K, the largest counts, beside what is typical of its own row, which has a scale of its own. By a block of
// threads; the answers are the same in every block that asks.
template <typename Element, int HeadDim, int Threads>
__device__ __forceinline__ bool find_factors(const QuantKInt8::Params& p, const KvSpan& span, Sample<HeadDim, Threads>& sample, int (&powers)[HeadDim]) {
  constexpr int kThreadsPerRow = 16;
  constexpr int kChannels = HeadDim / kThreadsPerRow;
  constexpr int kPerPass = Threads / kThreadsPerRow;
  constexpr int kPasses = QuantKInt8::kSampledKeys / kPerPass;
  constexpr int kWarps = Threads / 32;
  // Of K each warp sees for itself, all the same: that spares barriers where there is nothing to be done, which is mostly.
  float k_roots = 0.0f;
#pragma unroll
  for (int i = threadIdx.x % 32; i < HeadDim; i += 32) k_roots += ptx::sqrt(sample.spread[i]);
  k_roots = sum_of_warp(k_roots);
  const float k_typical = k_roots * k_roots;  // times head_dim^2
  const auto is_large = [&](float size) { return size * static_cast<float>(p.head_dim * p.head_dim) > QuantKInt8::kLarge * k_typical; };
  bool some_large = false;
#pragma unroll
  for (int i = threadIdx.x % 32; i < HeadDim; i += 32) some_large |= is_large(sample.spread[i]);
  if (__builtin_expect(!__any_sync(0xffffffffu, some_large), 1)) return false;

  Sequence queries{0, 0, p.qo_len, 0};
  if (p.cu_seqlens_of_q != nullptr) {
    queries = sequence_at(p.cu_seqlens_of_q, p.sequences, p.qo_len, 1, static_cast<int>(span.mean / p.kv_heads));
  }
  if (queries.length == 0) return false;
  const int channel = threadIdx.x % kThreadsPerRow * kChannels;
  const int different = min(queries.length, QuantKInt8::kSampledKeys);  // tokens; the fewer, the more heads of each
  float sizes[kChannels] = {};
#pragma unroll 1
  for (int pass = 0; pass < kPasses; ++pass) {
    const int number = pass * kPerPass + static_cast<int>(threadIdx.x) / kThreadsPerRow;
    const int token = static_cast<int>(sampled_token<QuantKInt8::kSampledKeys>(number % different, queries.length));
    const int head = span.head * p.group + (number / different + number % different) % p.group;
    uint32_t bits[kChannels / 2];
    float x[kChannels];
    load_channels<kChannels>(bits, row_pointer<Element>(p.q, span.batch, head, int64_t{queries.first_token} + token), channel, p.head_dim, p.q.aligned16);
    unpack<Element>(x, bits);
    float root[1] = {};
#pragma unroll
    for (int i = 0; i < kChannels; ++i) root[0] += ptx::sqrt(fabsf(x[i]));
    const float roots = sums_of_16_lanes(root);
    // Of a row that is not finite no number, or zero, which the largest leaves out.
    const float share = ptx::divide(1.0f, ptx::max_nan(roots * roots, 1e-30f));
#pragma unroll
    for (int i = 0; i < kChannels; ++i) sizes[i] = fmaxf(sizes[i], fabsf(x[i]) * share);
  }
#pragma unroll
  for (int i = 0; i < kChannels; ++i) sizes[i] = fmaxf(sizes[i], __shfl_xor_sync(0xffffffffu, sizes[i], 16));
  if (threadIdx.x % 32 < kThreadsPerRow) {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) sample.partial[0][threadIdx.x / 32][channel + i] = sizes[i];
  }
  __syncthreads();
  const bool is_channel = static_cast<int>(threadIdx.x) < p.head_dim;
  const float k_size = is_channel ? sample.spread[threadIdx.x] : 0.0f;
  float q_size = 0.0f;
  if (is_channel) {
#pragma unroll
    for (int i = 0; i < kWarps; ++i) q_size = fmaxf(q_size, sample.partial[0][i][threadIdx.x]);
  }
  const float q_roots = sum_of_block(ptx::sqrt(q_size), sample.weight);
  // As far above the typical as Q's is below it: then both have the same share of their scales.
  const float ratio = ptx::divide(k_size * (q_roots * q_roots), k_typical * q_size);
  const int exponent = __float_as_int(fminf(ratio, 0x1p40f)) / (1 << 23) - 127;
  const int power = is_large(k_size) && ratio >= 2.0f ? min((exponent + 1) / 2, QuantKInt8::kMostPowers) : 0;
  if (threadIdx.x < HeadDim) powers[threadIdx.x] = power;
  return __syncthreads_or(power != 0);
}

}  // namespace sage
