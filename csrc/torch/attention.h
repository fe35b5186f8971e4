// The attention operators on CUDA tensors. Shapes, units and errors: sageattention/core.py, which validates for all
// devices; the checks here are those without which a direct call could read or write out of bounds.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

#include <optional>
#include <tuple>

namespace sage {

// `kernel` is the attention kernel's name, as kernels/attention/ spells it: which one suits is decided in Python. With `or_pytorch` it gives
// way to PyTorch's own attention for few queries or keys, where that is faster: lengths are looked at here, where they are known
// in compiled graphs too. `per_block_mean`: FP4 kernels subtract a mean of Q for each 128 rows, else one of all.
std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                             const std::optional<at::Tensor>& attn_mask, c10::string_view tensor_layout,
                                             bool is_causal, double sm_scale, bool smooth_k, bool smooth_v,
                                             bool return_lse, bool or_pytorch, c10::string_view kernel, bool per_block_mean);

// Sequences of q_heads x qo_len and kv_heads x kv_len tokens one after the other: q [tokens, q_heads, head_dim], and so on;
// sequence i has the tokens cu_seqlens[i] to cu_seqlens[i + 1]. Log-sum-exp is [q_heads, tokens].
std::tuple<at::Tensor, at::Tensor> attention_varlen(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                    const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                                                    int64_t max_seqlen_q, int64_t max_seqlen_k, bool is_causal,
                                                    double sm_scale, bool smooth_k, bool smooth_v, bool return_lse,
                                                    c10::string_view kernel);

}  // namespace sage
