// What is in each tile of an attention mask: what host and device agree on.
#pragma once

#include "kernels/attention/mma_sync/layout.h"

namespace sage {

struct MaskTiles {
  static constexpr int kRows = MmaSyncBlocks::kBlockM;
  static constexpr int kKeys = MmaSyncBlocks::kBlockN;
  static constexpr int kThreads = 128;

  struct Params {
    AttentionMask mask;  // tiles unset
    uint8_t* tiles;      // [batch, heads, ceil(rows / kRows), ceil(keys / kKeys)]
    // Of the mask, 1 where it is broadcast.
    int32_t heads;
    int32_t rows;
    int32_t keys;
  };
};

}  // namespace sage
