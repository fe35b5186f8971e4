#include "torch/few_tokens.h"

#include "kernels/attention/sm80_qk_f16_pv_f16.h"
#include "torch/expected_time.h"
#include "torch/mask.h"

namespace sage {

namespace {

// Rows of all start on 16 bytes.
bool rows_are_even(const Call& call) {
  for (const Tensor* tensor : {&call.q, &call.k, &call.v}) {
    if (!view(*tensor, call.shape.heads_first).aligned16) return false;
  }
  return true;
}

// 16 rows each, for a warp of the 16-bit kernel.
int64_t strips(const AttentionShape& shape) {
  return int64_t{shape.batch} * shape.q_heads * ((shape.qo_len + Sm80QkF16PvF16::kWarpM - 1) / Sm80QkF16PvF16::kWarpM);
}

// Whether the 16-bit kernel is faster than others of ours, which quantise, and than PyTorch's, if that may be taken. Kernels for Hopper alone, cuDNN's
// too, share K and V among more rows: with more keys, or queries, they are as fast, unless the call takes no longer than a launch in any case.
bool is_for_16_bit(const Call& call, bool or_pytorch) {
  using Kernel = Sm80QkF16PvF16;
  const AttentionShape& shape = call.shape;
  const int32_t head_dim = call.head_dim(), most_keys = Kernel::most_keys(head_dim);
  const bool shares = or_pytorch || (call.kernel.persistent && head_dim > 64);
  if (shape.qo_len > (shares ? Kernel::kMostQueriesWhereShared : Kernel::kMostQueries) || shape.kv_len > most_keys) return false;
  return rows_are_even(call) && (!or_pytorch || shape.kv_len <= most_keys / 2 || strips(shape) <= 512);
}

std::tuple<Tensor, Tensor> attention_in_16_bit(Call& call, const std::optional<Tensor>& attn_mask) {
  using Kernel = Sm80QkF16PvF16;
  const AttentionShape& shape = call.shape;
  const Tensor out = call.empty({call.q.size(0), call.q.size(1), call.q.size(2), shape.v_head_dim}, call.q.scalar_type());
  const Tensor lse = call.options.return_lse ? call.empty({shape.batch, shape.q_heads, shape.qo_len}, kFloat) : call.empty({0}, kFloat);
  Kernel::Params params{};
  params.q = view(call.q, shape.heads_first);
  params.k = view(call.k, shape.heads_first);
  params.v = view(call.v, shape.heads_first);
  params.out = view(out, shape.heads_first);
  if (attn_mask.has_value()) {
    params.mask = described(call, *attn_mask);
    params.mask_together = has_even_rows(params.mask, static_cast<int64_t>(attn_mask->element_size())) ? 1 : 0;
  }
  params.lse = data_or_null<float>(lse);
  params.batch = shape.batch;
  params.q_heads = shape.q_heads;
  params.kv_heads = shape.kv_heads;
  params.qo_len = shape.qo_len;
  params.kv_len = shape.kv_len;
  params.head_dim = shape.head_dim;
  params.v_head_dim = shape.v_head_dim;
  params.causal = call.options.is_causal ? 1 : 0;
  params.scale_log2 = static_cast<float>(call.sm_scale * kLog2E);
  call.stream = current_stream(call.device());
  const uint32_t blocks = grid_size(strips(shape) + Kernel::kWarps - 1) / Kernel::kWarps;  // of strips there are fewer than 2^31 too
  launch(call, "sm80_qk_f16_pv_f16", blocks, Kernel::kThreads, /*overlaps_previous=*/false, &params);
  return {out, lse};
}

// Whether PyTorch's attention by cuDNN can do it: it wants rows that start on 16 bytes, and no dimension that repeats the same memory. For
// scales of 0 and below it returns NaN.
bool pytorch_can(const Call& call) {
  for (const Tensor* tensor : {&call.q, &call.k, &call.v}) {
    if (!copy_engine_reads(*tensor, view(*tensor, call.shape.heads_first))) return false;
  }
  return call.shape.head_dim == call.shape.v_head_dim && call.sm_scale > 0.0;
}

// Tokens and heads for each other.
Tensor transposed(const Tensor& x) {
  return x.as_strided({x.size(0), x.size(2), x.size(1), x.size(3)}, {x.stride(0), x.stride(2), x.stride(1), x.stride(3)});
}

std::tuple<Tensor, Tensor> pytorch_attention(const Call& call) {
  const AttentionShape& shape = call.shape;
  const auto turned = [&](const Tensor& x) { return shape.heads_first ? x : transposed(x); };
  const bool return_lse = call.options.return_lse;
  const auto [result, lse] =
      cudnn_attention(turned(call.q), turned(call.k), turned(call.v), return_lse, call.options.is_causal, call.sm_scale);
  const Tensor out = turned(result);
  const int64_t heads = shape.q_heads, rows = shape.qo_len;
  // Some releases of PyTorch add a dimension of 1.
  return {out.is_contiguous() ? out : copied(out),
          return_lse ? lse.as_strided({shape.batch, heads, rows}, {heads * rows, rows, 1}) : call.empty({0}, kFloat)};
}

}  // namespace

std::optional<std::tuple<Tensor, Tensor>> attention_of_few_tokens(Call& call, const std::optional<Tensor>& attn_mask) {
  if (call.q.numel() == 0) return std::nullopt;
  const bool or_pytorch = call.options.or_pytorch && !attn_mask.has_value() &&
                          pytorch_is_faster(call, runtime::KernelStore::get().device(call.device()).multiprocessors) && pytorch_can(call);
  if (call.options.or_16_bit && is_for_16_bit(call, or_pytorch)) return attention_in_16_bit(call, attn_mask);
  if (or_pytorch) return pytorch_attention(call);
  return std::nullopt;
}

}  // namespace sage
