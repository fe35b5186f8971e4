// The attention operators on CUDA tensors. Shapes, units and errors: sageattention/core.py, which validates for all
// devices; the checks here are those without which a direct call could read or write out of bounds.
#pragma once

#include <optional>
#include <tuple>

#include "torch/tensor.h"

namespace sage {

// `kernel` is the attention kernel's number in attention_kernels.cpp: which one suits is decided in Python. With `or_pytorch` it gives
// way to PyTorch's own attention for few queries or keys, where that is faster: lengths are looked at here, where they are known
// in compiled graphs too. `per_block_mean`: FP4 kernels subtract a mean of Q for each 128 rows, else one of all.
std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                             const std::optional<Tensor>& attn_mask, bool heads_first,
                                             bool is_causal, double sm_scale, bool smooth_k, bool smooth_v,
                                             bool return_lse, bool or_pytorch, int64_t kernel, bool per_block_mean);

// Sequences of q_heads x qo_len and kv_heads x kv_len tokens one after the other: q [tokens, q_heads, head_dim], and so on;
// sequence i has the tokens cu_seqlens[i] to cu_seqlens[i + 1]. Log-sum-exp is [q_heads, tokens].
std::tuple<Tensor, Tensor> attention_varlen(const Tensor& q, const Tensor& k, const Tensor& v,
                                                    const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                                    int64_t max_seqlen_q, int64_t max_seqlen_k, bool is_causal,
                                                    double sm_scale, bool smooth_k, bool smooth_v, bool return_lse,
                                                    int64_t kernel);

}  // namespace sage
