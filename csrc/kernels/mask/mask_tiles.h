// What is in each tile of an attention mask: what host and device agree on.
#pragma once

#include "kernels/attention/params.h"
#include "kernels/mask/seen_keys.h"

namespace sage {

struct MaskTiles {
  static constexpr int kKeys = SeenKeys::kKeys;  // of a tile
  static constexpr int kRows = 128;  // of a tile for mma.sync
  static constexpr int kWgmmaRows = 64;
  static constexpr int kWords = 128;  // of bits for such a tile: one for each thread of a warpgroup
  static constexpr int kThreads = 256;
  static constexpr int kTilesOfBlock = kThreads / 32;  // a warp each

  struct Params {
    AttentionMask mask;  // tiles and bits unset
    uint8_t* tiles;      // [batch, heads, ceil(rows / mask.tile_rows), ceil(keys / kKeys)]
    uint32_t* bits;      // [as tiles, kWords]; null: not wanted
    uint32_t* seen;      // [as tiles, SeenKeys::kWords]: which keys some row of the tile sees, as far as the mask tells
    // Of the mask, 1 where it is broadcast.
    int32_t heads;
    int32_t rows;     // 1: of all rows the same
    int32_t keys;
    int32_t causal;   // bits and their tiles: keys past the row are hidden too
    int32_t alone;    // nothing but the mask hides keys
    int32_t vectors;  // rows can be read 16 bytes at a time
    uint32_t count;   // of tiles
  };
};

}  // namespace sage
