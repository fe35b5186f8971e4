// The same where K and V come by way of shared memory: what host and device agree on.
#pragma once

#include "kernels/attention/sm80_qk_f16_pv_f16_split_kv.h"

namespace sage {

struct Sm80QkF16PvF16SplitKvStaged : Sm80QkF16PvF16SplitKv {
  // It takes longer to begin with, and then memory is faster: where a warp reads more than so much, or more warps read than run at once (bench/notes-short.md).
  static constexpr int kMostUnstagedBytes = 64 << 10;

  static constexpr int stage_bytes(int head_dim) { return 2 * kBlockN * head_dim * 2; }  // K and V of a block of keys, of a warp
  // As there, where before that stages are too, behind all warps' Q.
  static constexpr int shared_bytes(int head_dim, int warps) {
    const int found = Sm80QkF16PvF16SplitKv::shared_bytes(head_dim, warps);
    const int inputs = warps * (Sm80QkF16PvF16::q_bytes_of_warp(head_dim) + stage_bytes(head_dim));
    return inputs > found ? inputs : found;
  }
  static constexpr int shared_bytes(int head_dim) { return shared_bytes(head_dim, most_warps(head_dim)); }
};

}  // namespace sage
