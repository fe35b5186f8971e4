// Attention with INT8 QK^T and FP16/BF16 PV on Hopper's wgmma: what host and device agree on.
#pragma once

#include "kernels/attention/params.h"
#include "kernels/quant/quant_k_int8.h"

namespace sage {

struct Sm90QkInt8PvF16 {
  // Warpgroups that compute, 64 rows each; one more loads. Three hide each other's latencies better than two
  // (bench/notes-hopper.md), but at head_dim 256 there are registers for two.
  static constexpr int consumers(int head_dim) { return head_dim <= 128 ? 3 : 2; }
  static constexpr int threads(int head_dim) { return 128 * (1 + consumers(head_dim)); }
  static constexpr int kRows = 64;  // of a warpgroup
  static constexpr int block_m(int head_dim) { return kRows * consumers(head_dim); }
  static constexpr int kBlockN = QuantKInt8::kBlockN;
  static constexpr int stages(int head_dim) { return head_dim <= 64 ? 4 : 3; }
  // A cluster takes its next tile when so many blocks of keys are left to be fetched: what the counter and Q take, and a margin.
  static constexpr int kTakenAhead = 12;
  static constexpr int stage_blocks(int head_dim) { return head_dim <= 128 ? 2 : 1; }  // of K, and as many of V
  // Q stays in registers, which spares shared memory a fourth of its reads and leaves room for the copy engine to fetch the next
  // tile's early. At head_dim 256 there are too few.
  static constexpr bool keeps_q(int head_dim) { return head_dim <= 128; }

  static constexpr int kScaleBytes = QuantKInt8::kScales * 4;
  static constexpr int kTileBytes = 128;  // of the description of a tile of the output
  static constexpr int kSeenBytes = 8;    // of what a mask says of a tile of keys
  // Q as the caller's or in INT8, three numbers a row, stages, two tiles' descriptions, barriers and an index, rounded up to 1024; slack
  // to start on 1024.
  static constexpr int bytes_of_all_kernels(int head_dim) {
    const int bytes = block_m(head_dim) * (head_dim * (keeps_q(head_dim) ? 2 : 1) + 3 * 4) +
                      stages(head_dim) * (stage_blocks(head_dim) * (kBlockN * head_dim * 3 + kScaleBytes + kSeenBytes) + 2 * 8) +
                      2 * kTileBytes + 7 * 8;
    return 1024 + (bytes + 1023) / 1024 * 1024;
  }

  // Through which a warp's output goes to memory: its 16 rows, 64 channels at a time.
  static constexpr int kOutBytes = 16 * 128;
  // Stages whose scales of K lie beside each other, and a barrier.
  static constexpr int kScaleStages = 16;
  static constexpr int scale_ring_bytes(int head_dim) { return kScaleStages * stage_blocks(head_dim) * kScaleBytes; }
  static constexpr int shared_bytes(int head_dim) {
    return bytes_of_all_kernels(head_dim) + consumer_warps(head_dim) * kOutBytes + scale_ring_bytes(head_dim) + 8;
  }

  struct Params : AttentionParams {
    TensorMap q_map;     // boxes of 64 channels x a warpgroup's rows, swizzled; where Q is kept
    TensorMap v_map;     // boxes of 64 channels x 64 tokens, swizzled
    TensorMap mask_map;  // boxes of 64 keys x 64 rows, swizzled; of a mask that is added
    int32_t* next_tile;  // which item of work comes next, once each cluster has one; QuantKInt8 starts it
    int32_t tile_rows;   // of the output: 64 for each of some or all of the cluster's warpgroups
    int32_t tiles_of_head;  // so many rows each; not of packed sequences
    int32_t tiles;       // of all heads
    int32_t first_rows_first;  // so that a head's last tile, which may have few rows, comes late; else last rows come first. Not of packed sequences
    // An item is a tile with all keys; of the last tiles, which would leave most multiprocessors idle, with one of `parts` parts of them.
    // First all tiles, with the first part if they are parted; then these with the second; ….
    int32_t items;
    int32_t parted_tiles;
    int32_t parts;
    float* partials;   // of warps that computed a part, for the one that adds the parts up: partial_floats(head_dim) of each lane
    int32_t* arrived;  // for each warp of such a tile: how many parts have been left; 0 before
  };

  static constexpr int kMostParts = 4;
  // A lane's output, and of its two rows sums, bases and scales.
  static constexpr int partial_floats(int head_dim) { return head_dim / 2 + 6; }
  static constexpr int consumer_warps(int head_dim) { return 4 * consumers(head_dim); }
};

}  // namespace sage
