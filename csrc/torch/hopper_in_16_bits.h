// Hopper's kernel in 16 bits: attention in one launch, for sequences too short to repay quantising K.
#pragma once

#include <cstdint>
#include <optional>

#include "torch/call.h"
#include "torch/mask.h"
#include "torch/tensor.h"

namespace sage {

// Rows of the output that are a tile, and how many microseconds a call is then expected to take.
struct TilesIn16Bits {
  int32_t rows;
  float time;
};

// The best.
TilesIn16Bits tiles_in_16_bits(const AttentionShape& shape, bool is_causal, MaskForm mask, int32_t multiprocessors);

// Whether it can serve a call.
bool can_in_16_bits(const Call& call, const std::optional<Tensor>& attn_mask);

// On the call's stream, in tiles of so many rows.
void attend_in_16_bits(Call& call, const std::optional<Tensor>& attn_mask, int32_t tile_rows, const Tensor& out, const Tensor& lse);

}  // namespace sage
