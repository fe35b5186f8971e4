// Which keys a block of threads quantises, and the mean of a sample of their tokens.
#pragma once

#include "kernels/element.cuh"
#include "kernels/sequences.cuh"

namespace sage {

struct KvSpan {
  int batch;           // of the tensor: 0 where sequences are packed
  int head;
  int first_key;       // of the batch element or sequence
  int end_key;         // before which the last span starts
  int length;          // of it
  int64_t first_token; // where it starts
  int64_t index;       // of the first span among all of the quantised tensor's
  int64_t mean;        // index of its mean

  KvSpan() = default;
  // `heads` and `tokens` are those of the whole tensor, as the grid is from `first_block` on; cu_seqlens is null where it is not packed. A block of
  // threads has a lot: `together` consecutive spans of a head and sequence.
  __device__ __forceinline__ KvSpan(const int32_t* cu_seqlens, int sequences, int heads, int tokens, int span_n, int together, int first_block = 0) {
    const int block = blockIdx.x - first_block;
    const int lot = together * span_n;
    if (cu_seqlens == nullptr) {
      const int spans = (tokens + span_n - 1) / span_n;
      const int lots = (spans + together - 1) / together;
      const int batch_head = block / lots;
      const int first_span = block % lots * together;
      batch = batch_head / heads;
      head = batch_head % heads;
      first_key = first_span * span_n;
      end_key = min(tokens, first_key + lot);
      length = tokens;
      first_token = 0;
      index = int64_t{batch_head} * spans + first_span;
      mean = batch_head;
    } else {
      const int lots = tokens / lot + sequences;  // slots, in 32 bits: a division of 64 is long
      const Sequence sequence = find_sequence(cu_seqlens, sequences, tokens, lot, block % lots);
      batch = 0;
      head = block / lots;
      first_key = (block % lots - sequence.first_slot) * lot;
      length = sequence.index < sequences ? sequence.length : 0;
      end_key = min(length, first_key + lot);
      first_token = sequence.first_token;
      index = head * slots(tokens, sequences, span_n) + sequence.first_token / span_n + sequence.index + first_key / span_n;
      mean = static_cast<int64_t>(sequence.index) * heads + head;
    }
  }
};

// The token that stands for a stretch of them: one in each of so many equal stretches, at places that the golden ratio spreads. Evenly
// spaced ones of an image would all be of a column or two.
template <int Samples>
__device__ __forceinline__ int sampled_token(int sample, int length) {
  if (length <= Samples) return min(sample, length - 1);
  const auto start = [&](int i) { return i * (length / Samples) + i * (length % Samples) / Samples; };
  return start(sample) + static_cast<int>(__umulhi(static_cast<uint32_t>(sample) * 0x9e3779b9u, start(sample + 1) - start(sample)));
}

// What a sample of its tokens says of a tensor's channels; in shared memory.
template <int HeadDim, int Threads>
struct Sample {
  float mean[HeadDim];
  float spread[HeadDim];  // mean distance from it
  float partial[2][Threads / 32][HeadDim];
  float weight[Threads / 32];
};

// Estimates the mean of a tensor's tokens from this many of them. A token's vote weighs less the further it lies from the others, by the
// square of its distance: one far away, or some that a mask will hide, shall not move it. By a block of threads; their answers are
// the same in every block that asks.
template <int SampledTokens, bool WithSpread, typename Element, int HeadDim, int Threads>
__device__ __forceinline__ void take_sample(const TensorView& tensor, const KvSpan& span, int head_dim, Sample<HeadDim, Threads>& sample) {
  constexpr int kThreadsPerToken = 16;
  constexpr int kChannels = HeadDim / kThreadsPerToken;
  constexpr int kPerPass = Threads / kThreadsPerToken;
  constexpr int kPasses = SampledTokens / kPerPass;
  constexpr int kWarps = Threads / 32;
  static_assert(Threads >= HeadDim);
  const int channel = threadIdx.x % kThreadsPerToken * kChannels;
  const int warp = threadIdx.x / 32;
  const int samples = min(span.length, SampledTokens);
  const auto number = [&](int pass) { return pass * kPerPass + static_cast<int>(threadIdx.x) / kThreadsPerToken; };
  const auto* tokens = row_pointer<Element>(tensor, span.batch, span.head, span.first_token);
  const auto row = [&](int pass) { return tokens + sampled_token<SampledTokens>(number(pass), span.length) * tensor.token_stride; };
  uint32_t bits[kPasses][kChannels / 2];
  load_rows<kChannels>(bits, row, channel, head_dim, tensor.aligned16);

  const auto tell = [&](float(&sums)[kWarps][HeadDim], const float(&x)[kChannels]) {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      // Lanes 16 apart have the same channels of two tokens.
      const float both = x[i] + __shfl_xor_sync(0xffffffffu, x[i], 16);
      if (threadIdx.x % 32 < 16) sums[warp][channel + i] = both;
    }
  };
  const auto total = [&](const float(&sums)[kWarps][HeadDim]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += sums[i][threadIdx.x];
    return sum;
  };

  float sum[kChannels] = {};
  const float share = 1.0f / static_cast<float>(samples);
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    float x[kChannels];
    unpack<Element>(x, bits[pass]);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) sum[i] += number(pass) < samples ? x[i] * share : 0.0f;
  }
  tell(sample.partial[0], sum);
  __syncthreads();
  if (threadIdx.x < HeadDim) sample.mean[threadIdx.x] = total(sample.partial[0]);
  __syncthreads();

  float moved[kChannels] = {}, spread[kChannels] = {}, votes = 0.0f;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    float x[kChannels], distance = 0.0f;
    unpack<Element>(x, bits[pass]);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      x[i] -= sample.mean[channel + i];
      distance += fabsf(x[i]);
    }
#pragma unroll
    for (int lane = kThreadsPerToken / 2; lane > 0; lane /= 2) distance += __shfl_xor_sync(0xffffffffu, distance, lane);
    // A token that is infinitely far has no vote, and none has one where all are. That of the nearest is a number.
    const bool counts = number(pass) < samples && distance < 1e18f;
    const float inverse = __fdividef(1.0f, fmaxf(distance, 1e-18f));
    const float weight = counts ? inverse * inverse : 0.0f;
    votes += weight;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      const float difference = counts ? x[i] : 0.0f;
      moved[i] += weight * difference;
      if constexpr (WithSpread) spread[i] += weight * fabsf(difference);
    }
  }
  tell(sample.partial[0], moved);
  if constexpr (WithSpread) tell(sample.partial[1], spread);
  votes += __shfl_xor_sync(0xffffffffu, votes, 16);
  if (threadIdx.x % 32 == 0) sample.weight[warp] = votes;
  __syncthreads();
  if (threadIdx.x < HeadDim) {
    votes = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) votes += sample.weight[i];
    if (votes > 0.0f) sample.mean[threadIdx.x] += total(sample.partial[0]) / votes;
    if constexpr (WithSpread) sample.spread[threadIdx.x] = votes > 0.0f ? total(sample.partial[1]) / votes : INFINITY;
  }
  __syncthreads();
}

}  // namespace sage
