// Attention of few tokens in 16 bits: what host and device agree on.
#pragma once

#include "kernels/attention/params.h"

namespace sage {

struct Sm80QkF16PvF16 {
  static constexpr int kThreads = 128;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kWarpM = 16;  // rows of the output that a warp computes
  // Of a multiprocessor: so many hide each other's waiting, and have the registers that they need.
  static constexpr int warps_per_sm(int head_dim) { return head_dim <= 64 ? 16 : 8; }
  // Of shared memory, for Q: where registers are short.
  static constexpr int q_bytes_of_warp(int head_dim) { return head_dim <= 128 ? 0 : kWarpM * head_dim * 2; }
  static constexpr int shared_bytes(int head_dim) { return kWarps * q_bytes_of_warp(head_dim); }

  // Up to which it is faster than kernels that quantise; and how many queries may be its where others share K and V among more: bench/notes-short.md.
  static constexpr int most_keys(int head_dim) { return head_dim <= 64 ? 96 : head_dim <= 128 ? 64 : 32; }
  static constexpr int kMostQueries = 1024;
  static constexpr int kMostQueriesWhereShared = 128;

  struct Params {
    TensorView q, k, v, out;  // rows start on 16 bytes and hold a multiple of that
    AttentionMask mask;       // without tiles
    int32_t mask_together;    // its rows start on 16 bytes, and their keys lie one after the other
    float* lse;               // [batch, q_heads, qo_len], natural logarithm; null: not wanted
    int32_t batch;
    int32_t q_heads;
    int32_t kv_heads;
    int32_t qo_len;
    int32_t kv_len;
    int32_t head_dim;    // of Q and K; the kernel's own may be larger
    int32_t v_head_dim;  // of V and the output
    int32_t causal;      // query i sees keys 0..i
    float scale_log2;    // sm_scale * log2(e)
    float level;         // what a row's probabilities are at its largest score, as a power of two: sums of products with V's largest numbers are numbers
  };
};

}  // namespace sage
