// Attention with INT8 QK^T and FP16/BF16 PV on Hopper's wgmma: what host and device agree on.
#pragma once

#include "kernels/attention/params.h"
#include "kernels/quant/quant_k_int8.h"

namespace sage {

struct Sm90QkInt8PvF16 {
  // Warpgroups that compute, 64 rows each; one more loads. Three hide each other's latencies much better than two, and
  // tiles of 64 keys make room for the third one's registers at head_dim 128: measured in bench/notes.md.
  static constexpr int kConsumers = 3;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kBlockM = 64 * kConsumers;
  static constexpr int tile_n(int head_dim) { return head_dim <= 64 ? 128 : 64; }
  static constexpr int stages(int head_dim) { return head_dim <= 64 ? 4 : 6; }  // of K and of V

  // Q and the tiles of K and V, the K tiles' scales, what a row carries, barriers; and slack to start on 1024 bytes.
  static constexpr int scale_bytes(int head_dim) {
    return tile_n(head_dim) / QuantKInt8::kBlockN * QuantKInt8::kScales * 4;
  }
  static constexpr int shared_bytes(int head_dim) {
    return 1024 + kBlockM * head_dim + stages(head_dim) * (tile_n(head_dim) * head_dim * 3 + scale_bytes(head_dim)) +
           kBlockM * 8 + 4 * stages(head_dim) * 8;
  }

  struct Params : AttentionParams {
    TensorMap v_map;   // of V, in boxes of 64 channels x tile_n keys; if v_mapped
    int32_t v_mapped;  // the copy engine can read V; else the kernel's threads copy it
  };
};

}  // namespace sage
