// How a call's output is cut into tiles, and these are shared out.
#pragma once

#include <cstdint>

#include "torch/call.h"
#include "torch/mask.h"

namespace sage {

struct Tiling {
  int32_t block_rows = 0;  // of the output, that a block of threads computes at a time
  int32_t cluster = 1;     // blocks that compute neighbouring rows and share what they read of K and V
  int32_t tiles = 0;       // of the output: rows of a cluster
  uint32_t blocks = 0;     // of threads
  // Of a persistent kernel, whose blocks take one item after the other: Sm90QkInt8PvF16::Params.
  int32_t parted_tiles = 0, parts = 1, items = 0;
  bool first_rows_first = false;
  float time = 0.0f;  // expected, in units of a tile's block of 64 keys; unset where a mask hides, or sequences are packed

  int32_t tile_rows() const { return block_rows * cluster; }
};

// What a tile of a persistent kernel takes beside its keys: as long as so many blocks of these.
constexpr float kBlocksOfTile = 3.7f;

Tiling tiling_of(const Call& call, int32_t multiprocessors, MaskForm mask);

}  // namespace sage
