// The attention operators on CUDA tensors. Shapes, units and errors: sageattention/core.py. What is wrong with
// them is refused here; sageattention/validation.py then finds the words.
#pragma once

#include <optional>
#include <tuple>

#include "torch/tensor.h"

namespace sage {

// What a call asks for, but for its numbers: bits of one argument, since PyTorch takes 0.2 µs to hand each over. sageattention/_ops.py
// has the same.
struct AttentionOptions {
  explicit AttentionOptions(int64_t bits)
      : heads_first(bits & 1),
        is_causal(bits & 2),
        smooth_k(bits & 4),
        smooth_v(bits & 8),
        return_lse(bits & 16),
        per_block_mean(bits & 32),
        or_16_bit(bits & 64),
        out_turned(bits & 128),
        kernel(bits >> 8) {}

  bool heads_first;  // [batch, head, token, channel], else [batch, token, head, channel]
  bool is_causal, smooth_k, smooth_v;
  bool return_lse;      // else log-sum-exp is an empty tensor
  bool per_block_mean;  // FP4 kernels subtract a mean of Q for each 128 rows, else one of all
  bool or_16_bit;       // for few tokens sm80_qk_f16_pv_f16, for few queries sm80_qk_f16_pv_f16_split_kv[_staged], for short sequences sm90_qk_f16_pv_f16: then faster
  bool out_turned;      // heads and tokens of the output lie in memory in the other order than its dimensions have
  int64_t kernel;       // the attention kernel's number in attention_kernels.cpp: which one suits is decided in Python
};

std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& attn_mask,
                                     double sm_scale, int64_t options);

// Sequences of q_heads x qo_len and kv_heads x kv_len tokens one after the other: q [tokens, q_heads, head_dim], and so on;
// sequence i has the tokens cu_seqlens[i] to cu_seqlens[i + 1]. Log-sum-exp is [q_heads, tokens].
std::tuple<Tensor, Tensor> attention_varlen(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
                                            const Tensor& cu_seqlens_k, double sm_scale, int64_t options);

}  // namespace sage
