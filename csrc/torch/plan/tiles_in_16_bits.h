// How Hopper's kernel in 16 bits cuts its output into tiles.
#pragma once

#include <algorithm>
#include <cstdint>

#include "torch/arguments.h"
#include "torch/mask.h"

namespace sage {

// Rows of the output that are a tile, and how many microseconds a call is then expected to take.
struct TilesIn16Bits {
  int32_t rows;
  float time;
};

// The best.
TilesIn16Bits tiles_in_16_bits(const AttentionShape& shape, bool is_causal, MaskForm mask, int32_t multiprocessors);

// The kernel's own head_dim that serves these.
inline int32_t head_dim_in_16_bits(const AttentionShape& shape) { return (std::max(shape.head_dim, shape.v_head_dim) + 63) / 64 * 64; }

inline int32_t tiles_of_head(const AttentionShape& shape, int32_t rows) { return (shape.qo_len - 1) / rows + 1; }

// Heads whose tiles are computed one beside the other, last rows first: few, so that K and V are not all fetched at the beginning. But a
// multiprocessor, whose tiles are multiprocessors / heads of a head apart, is to have each of a head's in turn, as the last one may be short.
int32_t heads_in_turn(int32_t tiles_of_head, int32_t multiprocessors);

}  // namespace sage
