// Attention in 16 bits on Hopper's wgmma, for sequences too short to repay quantising K: what host and device agree on.
#pragma once

#include "kernels/attention/params.h"

namespace sage {

struct Sm90QkF16PvF16 {
  // A block of threads has one team or two, each with its own tiles, and each of two or three warpgroups that compute, 64 rows each. One more loads for all.
  static constexpr int teams(int head_dim) { return head_dim <= 64 ? 2 : 1; }
  static constexpr int consumers(int head_dim) { return head_dim > 64 && head_dim <= 128 ? 3 : 2; }  // of a team
  static constexpr int threads(int head_dim) { return 128 * (1 + teams(head_dim) * consumers(head_dim)); }
  static constexpr int kRows = 64;  // of a warpgroup
  static constexpr int kWarpRows = kRows / 4;
  static constexpr int block_m(int head_dim) { return kRows * consumers(head_dim); }
  static constexpr int kBlockN = 64;
  // Of a block of K and the one of V before it; mask_bytes: of what a mask says of a warp's rows and a block of keys, or none.
  static constexpr int stages(int head_dim, int mask_bytes) { return head_dim <= 64 ? 4 : head_dim <= 128 ? (mask_bytes > 0 ? 3 : 4) : head_dim <= 192 ? 3 : 2; }
  // Of the output, of which shared memory holds Q and a description: where there is room, the next one beside this one.
  static constexpr int tiles(int head_dim) { return head_dim <= 128 ? 2 : 1; }
  static constexpr int kTileBytes = 128;
  // Of a team: Q, stages, what a mask says, descriptions and barriers, rounded up.
  static constexpr int team_bytes(int head_dim, int mask_bytes) {
    const int bytes = tiles(head_dim) * block_m(head_dim) * head_dim * 2 + stages(head_dim, mask_bytes) * kBlockN * head_dim * 4 +
                      4 * consumers(head_dim) * mask_bytes + tiles(head_dim) * (kTileBytes + 3 * 8) + stages(head_dim, mask_bytes) * 2 * 8;
    return (bytes + 1023) / 1024 * 1024;
  }
  static constexpr int shared_bytes(int head_dim, int mask_bytes = 0) { return teams(head_dim) * team_bytes(head_dim, mask_bytes) + 1024; }  // slack to start on 1024

  struct Params : AttentionParams {
    TensorMap q_map;  // boxes of 64 channels x a warpgroup's rows, swizzled
    TensorMap k_map;  // boxes of 64 channels x 64 tokens, swizzled
    TensorMap v_map;
    int32_t tile_rows;  // of the output: 64 for each of some or all warpgroups
    int32_t tiles_of_head;  // so many rows each
    int32_t tiles;      // of all heads
    int32_t mask_bytes;  // that can be copied together: its rows start on so many, 16 or 4, and their keys lie one after the other; else those of an element
  };
};

}  // namespace sage
