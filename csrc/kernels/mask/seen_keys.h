// Which keys some query sees, of any head: what host and device agree on. Others, as those of a cache that is not full, shall have no part in a mean or
// a scale.
#pragma once

#include "kernels/tensor_view.h"

namespace sage {

struct SeenKeys {
  static constexpr int kKeys = 64;  // of a tile
  static constexpr int kWords = 4;  // of a tile: each has 16 keys, those that threads of mma.sync and wgmma, and groups of K's scales, have
  static constexpr int kThreads = 256;
  static constexpr int kTilesOfBlock = kThreads / 32;  // a warp each

  // Where among a tile's a key's bit stands.
  SAGE_HOST_DEVICE static constexpr int word(int key) { return key % 8 / 2; }
  SAGE_HOST_DEVICE static constexpr int bit(int key) { return key % kKeys / 8 * 4 + key % 2; }

  // What quantisation is told.
  struct Words {
    const uint32_t* data;  // [batch, tiles, kWords]; null: all are seen
    int64_t batch_stride;  // 0: of all batch elements the same
  };

  struct Params {
    const uint32_t* parts;   // [batch, parts_of_batch, tiles, kWords], as mask_tiles leaves them
    uint32_t* words;         // [batch, tiles, kWords], written
    int32_t parts_of_batch;  // heads and tiles of rows
    int32_t tiles;           // of keys
    int32_t count;           // of all batch elements
  };
};

}  // namespace sage
