// An attention mask, from PyTorch's tensor to what kernels are told of it.
#pragma once

#include <cstdint>
#include <optional>

#include "kernels/attention/params.h"
#include "kernels/mask/seen_keys.h"
#include "torch/call.h"
#include "torch/tensor.h"

namespace sage {

// A mask as kernels are told of it, with the tensors that it lies in.
struct LookedAt {
  Tensor data, tiles, bits, seen_by_tiles, seen_keys;
  AttentionMask mask{};
  SeenKeys::Words seen{};
  int32_t batch = 1, heads = 1, rows = 1;  // of data, 1 where it is broadcast
};

// What a mask says, as far as its strides tell: of keys, the same to all rows, of each score, or of each score and head.
enum class MaskForm : int32_t { kNone, kBoolOfKeys, kBool, kNumbersOfKeys, kNumbers, kNumbersOfHeads };

// Throws ValueError or TypeError for what no kernel takes.
AttentionMask described(const Call& call, const Tensor& attn_mask);
// What it says of so many keys, where the call's others are left out. Throws as `described`.
Tensor of_first_keys(const Call& call, const Tensor& attn_mask, int64_t keys);
MaskForm form_of(const AttentionMask& mask);
MaskForm form_of(const Call& call, const std::optional<Tensor>& attn_mask);

// Whether rows start on so many bytes and their keys lie one after the other: the copy engine, and vectors, read such.
bool has_even_rows(const AttentionMask& mask, int64_t element_size, int64_t bytes = 16);

// Whether Hopper's kernels take a mask of this dtype; throws TypeError if not.
bool has_hoppers_type(const Call& call, const Tensor& attn_mask);
void check_hoppers_type(const Call& call, const Tensor& attn_mask);

// The same as described, and has the mask looked at: mask_tiles.cu.
LookedAt look_at_mask(const Call& call, const Tensor& attn_mask);

}  // namespace sage
