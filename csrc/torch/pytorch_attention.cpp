#include "torch/pytorch_attention.h"

#include "kernels/mask/hidden_rows.h"
#include "torch/mask.h"

namespace sage {

namespace {

// A bias of each head, which hides little as a rule, in numbers that cuDNN adds: else it is a mask that hides, and ours leaves out what that hides.
bool is_bias(const Call& call, const Tensor& attn_mask) {
  if (attn_mask.scalar_type() != call.q.scalar_type()) return false;
  const AttentionMask mask = described(call, attn_mask);
  return mask.head_stride != 0 && mask.row_stride != 0 && has_even_rows(mask, static_cast<int64_t>(attn_mask.element_size()));
}

// Tokens and heads for each other.
Tensor transposed(const Tensor& x) {
  return x.as_strided({x.size(0), x.size(2), x.size(1), x.size(3)}, {x.stride(0), x.stride(2), x.stride(1), x.stride(3)});
}

// To cuDNN a query all of whose keys a mask hides by large numbers sees them all alike.
void hide_rows(const Call& call, const AttentionMask& mask, const Tensor& out, const Tensor& lse) {
  const AttentionShape& shape = call.shape;
  HiddenRows::Params params{};
  params.mask = mask;
  params.out = view(out, shape.heads_first);
  params.lse = data_or_null<float>(lse);
  params.batch = shape.batch;
  params.heads = shape.q_heads;
  params.qo_len = shape.qo_len;
  params.kv_len = shape.kv_len;
  params.v_head_dim = shape.v_head_dim;
  const int64_t rows = int64_t{shape.batch} * shape.q_heads * shape.qo_len;
  launch_common(call, "hidden_rows", (rows + HiddenRows::kThreads - 1) / HiddenRows::kThreads, HiddenRows::kThreads, /*overlaps_previous=*/true, &params);
}

}  // namespace

// cuDNN wants rows that start on 16 bytes, and no dimension that repeats the same memory. For scales of 0 and below it returns NaN.
bool pytorch_can(const Call& call, const std::optional<Tensor>& attn_mask) {
  if (attn_mask.has_value() && !is_bias(call, *attn_mask)) return false;
  for (const Tensor* tensor : {&call.q, &call.k, &call.v}) {
    if (!copy_engine_reads(*tensor, view(*tensor, call.shape.heads_first))) return false;
  }
  return call.shape.head_dim == call.shape.v_head_dim && call.sm_scale > 0.0;
}

std::tuple<Tensor, Tensor> pytorch_attention(Call& call, const std::optional<Tensor>& attn_mask) {
  const AttentionShape& shape = call.shape;
  const auto turned = [&](const Tensor& x) { return shape.heads_first ? x : transposed(x); };
  AttentionMask mask{};
  std::optional<Tensor> bias;
  if (attn_mask.has_value()) {
    mask = described(call, *attn_mask);
    bias = attn_mask;
    const int64_t sizes[] = {shape.batch, shape.q_heads, shape.qo_len, shape.kv_len};
    if (attn_mask->dim() != 4 || attn_mask->numel() != sizes[0] * sizes[1] * sizes[2] * sizes[3]) {
      const auto size = static_cast<int64_t>(attn_mask->element_size());
      bias = attn_mask->as_strided({sizes, 4}, {mask.batch_stride / size, mask.head_stride / size, mask.row_stride / size, mask.key_stride / size});
    }
  }
  const bool with_lse = call.options.return_lse || bias.has_value();
  auto [result, lse] = cudnn_attention(turned(call.q), turned(call.k), turned(call.v), bias, with_lse, call.options.is_causal, call.sm_scale);
  Tensor out = turned(result);
  if (!out.is_contiguous()) out = copied(out);
  if (bias.has_value()) {
    call.stream = current_stream(call.device());
    hide_rows(call, mask, out, lse);
  }
  if (!call.options.return_lse) return {out, call.empty({0}, kFloat)};
  const int64_t heads = shape.q_heads, rows = shape.qo_len;
  return {out, lse.as_strided({shape.batch, heads, rows}, {heads * rows, rows, 1})};  // some releases of PyTorch add a dimension of 1
}

}  // namespace sage
