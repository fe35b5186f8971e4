// PyTorch's own attention, by cuDNN, in the place of ours.
#pragma once

#include <optional>
#include <tuple>

#include "torch/call.h"
#include "torch/tensor.h"

namespace sage {

// Whether it can serve a call, and, of those with a mask, may.
bool pytorch_can(const Call& call, const std::optional<Tensor>& attn_mask);

// Output and log-sum-exp.
std::tuple<Tensor, Tensor> pytorch_attention(Call& call, const std::optional<Tensor>& attn_mask);

}  // namespace sage
