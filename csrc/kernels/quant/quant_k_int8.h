// Quantisation of K to INT8: what host and device agree on.
#pragma once

#include "kernels/quant/kv_spans.h"

namespace sage {

struct QuantKInt8 {
  // One scale serves the keys of a block of 64 that one lane of the attention kernel's mma fragment sees: those with the
  // same (key % 8) / 2. So 16 keys share a scale and the attention kernel multiplies by a per-lane constant.
  static constexpr int kBlockN = 64;
  static constexpr int kGroups = 4;
  // A block's scales, then for each group a bound: no score of its keys exceeds bound * |q|, by Cauchy and Schwarz.
  static constexpr int kScales = 2 * kGroups;
  // Blocks come in pairs.
  static constexpr int kSpanN = KvSpans::kSpanN;
  static_assert(kSpanN == 2 * kBlockN);
  static constexpr int kThreads = 256;
  // Any estimate of K's mean serves (softmax does not see the shift); this many keys are read for it.
  static constexpr int kSampledKeys = 64;
  // Of Q, of all heads that share one of K. A head's are from all over its tokens: from one to the next it is an odd number of stretches.
  static constexpr int kSampledRows = 16, kRowStep = 7;
  // A head is rotated where a channel's mean distance from K's mean is so many times the channels' typical one, or a sampled row of Q has a number that is so
  // many times its mean magnitude.
  static constexpr float kLargeInK = 4.0f, kLargeInQ = 8.0f;
  // Channels are made larger or smaller before by so many powers of two at most: no more, since the few rows that are sampled may be smaller there than others.
  static constexpr int kMostPowers = 4;
  // And all together by so many at most, of float16 channels that are typically smaller than one over that: no sum overflows but of a number 2^24 times as large.
  static constexpr int kMostLift = 8;
  // Of factors on Q, and on K but for the half that it is multiplied by anyway: they make all numbers smaller, so that no sum of the rotation overflows.
  SAGE_HOST_DEVICE static constexpr float q_unit(int head_dim) { return static_cast<float>((1 << 2 * kMostPowers) * (head_dim / 4)); }
  SAGE_HOST_DEVICE static constexpr int spans(int kv_len) { return (kv_len + kSpanN - 1) / kSpanN; }
  SAGE_HOST_DEVICE static constexpr int blocks(int kv_len) { return 2 * spans(kv_len); }
  struct Params : KvSpans {
    TensorView k;
    // [batch, kv_heads, blocks * 64, kHeadDim], or [kv_heads, slots of 128 keys (sequences.h), kHeadDim] of packed
    // sequences; zero past head_dim where the head is not rotated, anything past kv_len; the vectors of a row stand where shared
    // memory wants them (swizzle.cuh), so that a block is copied there as it is.
    int8_t* k_int8;
    float* k_scale;   // [batch, kv_heads, blocks, 2, 4]: scales and bounds
    float* k_mean;    // [batch or sequences, kv_heads, kHeadDim], written; null: K is not smoothed
    TensorView q;
    float* q_factor;  // [batch or sequences, kv_heads, kHeadDim], written where `rotated` is: what Q is multiplied by before; q_unit of it make good what K was
    int32_t* rotated;  // [batch or sequences, kv_heads], written: whether K is
    int32_t group;    // heads of Q that share one of K
    int32_t qo_len;
    const int32_t* cu_seqlens_of_q;  // null: not packed
    int32_t* next_tile;  // the attention kernel's counter, set to `first_tile`; null: it has none
    int32_t first_tile;
    int32_t zeros;       // numbers behind the counter that are set to 0
  };
};

}  // namespace sage
