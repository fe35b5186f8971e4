// Attention in 16 bits on Hopper's wgmma, for sequences too short to repay quantising K: what host and device agree on.
#pragma once

#include "kernels/attention/params.h"

namespace sage {

struct Sm90QkF16PvF16 {
  // A block of threads has one team or two, each with its own tiles, and each of two or three warpgroups that compute, 64 rows each. One more loads for all.
  static constexpr int teams(int head_dim) { return head_dim <= 64 ? 2 : 1; }
  static constexpr int consumers(int head_dim) { return head_dim <= 64 ? 2 : 3; }  // of a team
  static constexpr int threads(int head_dim) { return 128 * (1 + teams(head_dim) * consumers(head_dim)); }
  static constexpr int kRows = 64;  // of a warpgroup
  static constexpr int block_m(int head_dim) { return kRows * consumers(head_dim); }
  static constexpr int kBlockN = 64;
  static constexpr int kLargestHeadDim = 128;
  static constexpr int kStages = 4;   // a block of K, and the one of V before it
  static constexpr int kTiles = 2;    // of the output, of which shared memory holds Q and a description: the next beside this one
  static constexpr int kTileBytes = 128;
  // Of a team: Q, stages, descriptions and barriers, rounded up.
  static constexpr int team_bytes(int head_dim) {
    const int bytes = kTiles * block_m(head_dim) * head_dim * 2 + kStages * kBlockN * head_dim * 4 + kTiles * (kTileBytes + 2 * 8) + kStages * 2 * 8;
    return (bytes + 1023) / 1024 * 1024;
  }
  static constexpr int shared_bytes(int head_dim) { return teams(head_dim) * team_bytes(head_dim) + 1024; }  // slack to start on 1024

  struct Params : AttentionParams {
    TensorMap q_map;  // boxes of 64 channels x a warpgroup's rows, swizzled
    TensorMap k_map;  // boxes of 64 channels x 64 tokens, swizzled
    TensorMap v_map;
    int32_t tile_rows;  // of the output: 64 for each of some or all warpgroups
    int32_t tiles_of_head;  // so many rows each
    int32_t tiles;      // of all heads
  };
};

}  // namespace sage
