// The same of few queries and many keys, whose parts are many warps': what host and device agree on.
#pragma once

#include "kernels/attention/sm80_qk_f16_pv_f16.h"

namespace sage {

struct Sm80QkF16PvF16SplitKv {
  // Of a block of threads, which has a power of two.
  static constexpr int most_warps(int head_dim) { return head_dim <= 128 ? 8 : 4; }
  static constexpr int threads(int head_dim) { return 32 * most_warps(head_dim); }
  static constexpr int kWarpM = Sm80QkF16PvF16::kWarpM;
  static constexpr int kBlockN = 16;  // keys that a warp looks at together

  // Rows of a group, queries times heads that share K and V, up to which it is faster than kernels that quantise: bench/notes-short.md. As there,
  // Hopper's own share K and V among more.
  static constexpr int kMostRows = 64;
  static constexpr int kMostRowsWhereShared = 32;
  static constexpr int kMostParts = 64;
  // The blocks of a cluster, a power of two and each of two warps or more, add their parts up themselves.
  static constexpr int kMostPartsOfCluster = 8;

  // Where warps leave what is added up: two numbers of each row, and the output of half of them, rows 16 bytes further apart. Before that it is Q's, if
  // any is.
  static constexpr int kPadding = 4;
  static constexpr int shared_bytes(int head_dim, int warps) {
    const int found = warps == 1 ? 0 : (most_warps(head_dim) * 2 + warps / 2 * (head_dim + kPadding)) * kWarpM * 4;
    const int q = warps * Sm80QkF16PvF16::q_bytes_of_warp(head_dim);
    return q > found ? q : found;
  }
  static constexpr int shared_bytes(int head_dim) { return shared_bytes(head_dim, most_warps(head_dim)); }

  struct Params : Sm80QkF16PvF16::Params {
    int32_t bfloat16;      // or float16
    int32_t whole_blocks;  // of threads, the first ones: each warp has a strip of its own; where staged
    int32_t parts;         // of the keys of other strips: blocks of threads that have the same rows
    // Of a row, numbered as log-sum-exps are, and a part: what is to be added up (combine_split_kv); null: there is one part, or they are a cluster.
    float* part_out;   // [row, part, v_head_dim]
    float* part_sums;  // [row, part, 2]: largest score, in log2 units; sum of probabilities
  };
};

}  // namespace sage
