// PyTorch's own attention, by cuDNN, in the place of ours.
#pragma once

#include <optional>
#include <tuple>

#include "torch/call.h"
#include "torch/tensor.h"

namespace sage {

// Whether it may serve a call, can, and is expected to take no longer.
bool pytorch_serves(const Call& call, const std::optional<Tensor>& attn_mask);

// Output and log-sum-exp.
std::tuple<Tensor, Tensor> pytorch_attention(Call& call, const std::optional<Tensor>& attn_mask);

}  // namespace sage
