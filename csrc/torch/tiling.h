// How a call's output is cut into tiles, and these are shared out.
#pragma once

#include <cstdint>
#include <limits>

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

// Tiles whose rows see fewer keys the sooner they come, under a causal mask.
struct CausalTiles {
  int32_t strips;    // as many rows as a block has keys, of a head
  int32_t together;  // in a tile
  int32_t blocks;    // of keys
};

// How long the tiles of so many heads take, `at_once` of them at a time and the longest first, in blocks of keys: each tile as long as its
// strips in the mean, and as `tile` blocks beside. The last tile ends `late` longest tiles after the mean, but `latest` blocks at most.
float causal_rounds(const CausalTiles& tiles, int64_t heads, int32_t at_once, float tile, float late,
                    float latest = std::numeric_limits<float>::infinity());

// What a tile of a persistent kernel takes beside its keys: as long as so many blocks of these.
constexpr float kBlocksOfTile = 3.7f;

Tiling tiling_of(const Call& call, int32_t multiprocessors, MaskForm mask);

}  // namespace sage
