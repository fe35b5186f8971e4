// Which keys a block of threads quantises, and the mean of a sample of their tokens.
#pragma once

#include <cuda/std/type_traits>

#include "kernels/element.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/quant/kv_spans.h"
#include "kernels/quant/sampled_tokens.cuh"
#include "kernels/sequences.cuh"

namespace sage {

struct KvSpan {
  int batch;           // of the tensor: 0 where sequences are packed
  int head;
  int first_key;       // of the batch element or sequence
  int end_key;         // spans of this block of threads start before it
  int length;          // of it
  int64_t first_token; // where it starts
  int64_t index;       // of the first span among all of the quantised tensor's
  int64_t mean;        // index of its mean

  KvSpan() = default;
  // A block of threads, counted from `first_block` on, has a lot: `together` consecutive spans of a head and sequence. Unsigned numbers' division is shorter.
  __device__ __forceinline__ explicit KvSpan(const KvSpans& p, int first_block = 0) {
    constexpr int kSpanN = KvSpans::kSpanN;
    const uint32_t block = blockIdx.x - first_block, lots = p.lots;
    const int tokens = p.kv_len, lot = p.together * kSpanN;
    if (p.cu_seqlens == nullptr) {
      const int spans = (tokens + kSpanN - 1) / kSpanN;
      const uint32_t batch_head = block / lots;
      const int first_span = static_cast<int>(block - batch_head * lots) * p.together;
      batch = static_cast<int>(batch_head / static_cast<uint32_t>(p.kv_heads));
      head = static_cast<int>(batch_head) - batch * p.kv_heads;
      first_key = first_span * kSpanN;
      end_key = min(tokens, first_key + lot);
      length = tokens;
      first_token = 0;
      index = int64_t{batch_head} * spans + first_span;
      mean = batch_head;
    } else {
      batch = 0;
      head = static_cast<int>(block / lots);
      const int slot = static_cast<int>(block - head * lots);
      const Sequence sequence = find_sequence(p.cu_seqlens, p.sequences, tokens, lot, slot);
      first_key = (slot - sequence.first_slot) * lot;
      length = sequence.index < p.sequences ? sequence.length : 0;
      if (p.cu_seqlens_q != nullptr && length > 0) {
        length = max(0, min(length, p.cu_seqlens_q[sequence.index + 1] - p.cu_seqlens_q[sequence.index]));
      }
      end_key = min(length, first_key + lot);
      first_token = sequence.first_token;
      index = head * slots(tokens, p.sequences, kSpanN) + sequence.first_token / kSpanN + sequence.index + first_key / kSpanN;
      mean = static_cast<int64_t>(sequence.index) * p.kv_heads + head;
    }
  }
};

// Adds up over 16 lanes several numbers of each: a lane gets the sum of their (lane % 16 / (16 / Count))-th.
template <int Count, typename T>
__device__ __forceinline__ T sums_of_16_lanes(T (&x)[Count]) {
  int distance = 8;
#pragma unroll
  for (int half = Count / 2; half > 0; half /= 2, distance /= 2) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const T theirs = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + half], distance);
      x[i] = (upper ? x[i + half] : x[i]) + theirs;
    }
  }
#pragma unroll
  for (; distance > 0; distance /= 2) x[0] += __shfl_xor_sync(0xffffffffu, x[0], distance);
  return x[0];
}

constexpr int kMostSamples = 128;  // that anybody asks for

// What a sample of its tokens says of a tensor's channels; in shared memory.
template <int HeadDim, int Threads>
struct Sample {
  alignas(16) float mean[HeadDim];
  float spread[HeadDim];  // mean distance from it
  float partial[2][Threads / 32][HeadDim];
  float weight[Threads / 32];
  SeenSample<kMostSamples, Threads> seen;
};

struct NothingToAsk {
  __device__ __forceinline__ bool operator()() const { return false; }
};

// Estimates the mean of a tensor's tokens from this many of them: those that are seen, and where these are few, a sample of all that are.
// A token's vote weighs less the further it lies from the others, by the square of its distance: one far away shall not move it. By a block of
// threads; their answers are the same in every block that asks.
// While the tokens are on their way `ask` is called; whether any thread said yes is returned.
template <int SampledTokens, bool WithSpread, typename Element, int HeadDim, int Threads, typename Ask = NothingToAsk>
__device__ __forceinline__ bool take_sample(const TensorView& tensor, const KvSpan& span, int head_dim, const SeenByQueries& seen,
                                            Sample<HeadDim, Threads>& sample, const Ask& ask = {}) {
  constexpr int kThreadsPerToken = 16;
  constexpr int kChannels = HeadDim / kThreadsPerToken;
  constexpr int kPerPass = Threads / kThreadsPerToken;
  constexpr int kPasses = SampledTokens / kPerPass;
  constexpr int kWarps = Threads / 32;
  static_assert(Threads >= HeadDim);
  const int channel = threadIdx.x % kThreadsPerToken * kChannels;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto number = [&](int pass) { return pass * kPerPass + static_cast<int>(threadIdx.x) / kThreadsPerToken; };
  const auto* tokens = row_pointer<Element>(tensor, span.batch, span.head, span.first_token);
  int candidates = span.length;
  bool of_seen = false;
  const auto token = [&](uint32_t number) {
    return of_seen ? sample.seen.tokens[number] : static_cast<int>(sampled_token<SampledTokens>(number, span.length));
  };
  uint32_t votes_of[SampledTokens / 32];  // a bit for each token that has one
  const auto count_votes = [&] {
    int count = 0;
#pragma unroll
    for (int i = 0; i < SampledTokens / 32; ++i) {
      votes_of[i] = __ballot_sync(0xffffffffu, i * 32 + lane < candidates && seen(token(i * 32 + lane)));
      count += __popc(votes_of[i]);
    }
    return count;
  };
  int count = count_votes();
  if (count < min(span.length, SampledTokens) / 4) {
    candidates = sample_seen<SampledTokens>(seen, span.length, sample.seen);
    of_seen = true;
    count = count_votes();
  }
  const auto row = [&](int pass) { return tokens + int64_t{token(number(pass))} * tensor.token_stride; };
  uint32_t bits[kPasses][kChannels / 2];
  load_rows<kChannels>(bits, row, channel, head_dim, tensor.aligned16);
  const bool answer = ask();
  static_assert(32 % kPerPass == 0);
  const auto has_vote = [&](int pass) { return (votes_of[pass * kPerPass / 32] >> number(pass) % 32 & 1) != 0; };

  const auto tell = [&](float(&sums)[kWarps][HeadDim], float(&x)[kChannels]) {
    // Lanes 16 apart have the same channels of two tokens.
#pragma unroll
    for (int i = 0; i < kChannels; ++i) x[i] += __shfl_xor_sync(0xffffffffu, x[i], 16);
    if (lane >= 16) return;
#pragma unroll
    for (int i = 0; i < kChannels; i += 4) *reinterpret_cast<float4*>(&sums[warp][channel + i]) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
  };
  const auto total = [&](const float(&sums)[kWarps][HeadDim]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += sums[i][threadIdx.x];
    return sum;
  };

  float sum[kChannels] = {};
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const float share = __fdividef(1.0f, static_cast<float>(count));
    float x[kChannels];
    unpack<Element>(x, bits[pass]);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) sum[i] = has_vote(pass) ? __fmaf_rn(x[i], share, sum[i]) : sum[i];
  }
  tell(sample.partial[0], sum);
  __syncthreads();
  if (threadIdx.x < HeadDim) sample.mean[threadIdx.x] = total(sample.partial[0]);
  __syncthreads();

  float mean[kChannels], distances[kPasses];
#pragma unroll
  for (int i = 0; i < kChannels; ++i) mean[i] = sample.mean[channel + i];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    float x[kChannels];
    unpack<Element>(x, bits[pass]);
    distances[pass] = has_vote(pass) ? 0.0f : INFINITY;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) distances[pass] += fabsf(x[i] - mean[i]);
  }
  // A lane looks at one of its passes' tokens. One that is infinitely far weighs nothing, and none does where all are. The nearest's vote is a number.
  constexpr int kLanesPerPass = kThreadsPerToken / kPasses;
  const float distance = sums_of_16_lanes(distances);
  const float inverse = __fdividef(1.0f, fmaxf(distance, 1e-18f));
  const float vote = distance < 1e18f ? inverse * inverse : 0.0f;
  float moved[kChannels] = {}, spread[kChannels] = {}, votes = 0.0f;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const float weight = __shfl_sync(0xffffffffu, vote, lane / kThreadsPerToken * kThreadsPerToken + pass * kLanesPerPass);
    votes += weight;
    float x[kChannels];
    unpack<Element>(x, bits[pass]);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      const float difference = weight > 0.0f ? x[i] - mean[i] : 0.0f;
      moved[i] = __fmaf_rn(weight, difference, moved[i]);
      if constexpr (WithSpread) spread[i] = __fmaf_rn(weight, fabsf(difference), spread[i]);
    }
  }
  tell(sample.partial[0], moved);
  if constexpr (WithSpread) tell(sample.partial[1], spread);
  votes += __shfl_xor_sync(0xffffffffu, votes, 16);
  if (lane == 0) sample.weight[warp] = votes;
  __syncthreads();
  if (threadIdx.x < HeadDim) {
    votes = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) votes += sample.weight[i];
    if (votes > 0.0f) sample.mean[threadIdx.x] += total(sample.partial[0]) / votes;
    if constexpr (WithSpread) sample.spread[threadIdx.x] = votes > 0.0f ? ptx::divide(total(sample.partial[1]), votes) : INFINITY;
  }
  if constexpr (!cuda::std::is_same_v<Ask, NothingToAsk>) return __syncthreads_or(answer);
  __syncthreads();
  return answer;
}

}  // namespace sage
