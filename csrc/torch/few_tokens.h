// Calls of so few tokens that quantising does not repay: in 16 bits.
#pragma once

#include <optional>
#include <tuple>

#include "torch/call.h"
#include "torch/tensor.h"

namespace sage {

// Output and log-sum-exp; nothing where the call's own kernel serves it.
std::optional<std::tuple<Tensor, Tensor>> attention_of_few_tokens(Call& call, const std::optional<Tensor>& attn_mask);

}  // namespace sage
