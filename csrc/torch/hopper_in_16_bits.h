// Hopper's kernel in 16 bits: attention in one launch, for sequences too short to repay quantising K.
#pragma once

#include <cstdint>
#include <optional>

#include "torch/call.h"
#include "torch/tensor.h"

namespace sage {

// Whether it can serve a call.
bool can_in_16_bits(const Call& call, const std::optional<Tensor>& attn_mask);

// On the call's stream, in tiles of so many rows.
void attend_in_16_bits(Call& call, const std::optional<Tensor>& attn_mask, int32_t tile_rows, const Tensor& out, const Tensor& lse);

}  // namespace sage
