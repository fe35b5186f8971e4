#include "torch/few_tokens.h"

#include <algorithm>
#include <limits>

#include "kernels/attention/sm80_combine_split_kv.h"
#include "kernels/attention/sm80_qk_f16_pv_f16_split_kv.h"
#include "torch/mask.h"
#include "torch/pytorch_attention.h"

namespace sage {

namespace {

bool is_bfloat16(const Call& call) { return call.q.scalar_type() == kBFloat16; }

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
bool is_for_16_bit(const Call& call, bool or_pytorch, bool masked) {
  using Kernel = Sm80QkF16PvF16;
  const AttentionShape& shape = call.shape;
  const int32_t head_dim = call.head_dim();
  const bool beside_pytorch = or_pytorch && !masked;  // with a bias cuDNN was not measured beside this kernel
  const bool shares = beside_pytorch || (call.kernel.persistent && head_dim > 64);
  const bool looks_first = masked && !or_pytorch && call.kernel.persistent && shape.qo_len <= Kernel::kMostQueriesWhereShared;
  const int32_t most_keys = looks_first ? Kernel::most_masked_keys_where_shared(head_dim) : Kernel::most_keys(head_dim);
  if (shape.qo_len > (shares ? Kernel::kMostQueriesWhereShared : Kernel::kMostQueries) || shape.kv_len > most_keys) return false;
  return rows_are_even(call) && (!beside_pytorch || shape.kv_len <= most_keys / 2 || strips(shape) <= 512);
}

// Rows that share K and V: of a group of heads.
int64_t group_rows(const AttentionShape& shape) { return int64_t{shape.q_heads / shape.kv_heads} * shape.qo_len; }

// Whether reading many keys once, each by some warp, is all that such a call takes: as next to all that a language model writes.
bool is_for_split_kv(const Call& call) {
  using Kernel = Sm80QkF16PvF16SplitKv;
  return group_rows(call.shape) <= (call.kernel.persistent ? Kernel::kMostRowsWhereShared : Kernel::kMostRows) &&
         call.shape.kv_len > Sm80QkF16PvF16::most_keys(call.head_dim()) && rows_are_even(call);
}

Sm80QkF16PvF16::Params params_in_16_bit(const Call& call, const std::optional<Tensor>& attn_mask, const Tensor& out, const Tensor& lse) {
  const AttentionShape& shape = call.shape;
  Sm80QkF16PvF16::Params params{};
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
  // For as many keys; V's float16 numbers are small beside float32's.
  for (int64_t keys = 1; is_bfloat16(call) && keys < shape.kv_len; keys *= 2) params.level -= 1.0f;
  return params;
}

// Parts of the keys that take least time, counted in what a warp takes for a block of keys.
int32_t parts_of(const Call& call, int64_t group_strips) {
  using Kernel = Sm80QkF16PvF16SplitKv;
  constexpr int64_t kStart = 4;
  const int32_t head_dim = call.head_dim();
  const int64_t at_once = int64_t{runtime::KernelStore::get().device(call.device()).multiprocessors} * Kernel::at_once(head_dim);
  const int64_t blocks = (int64_t{call.shape.kv_len} + Kernel::kBlockN - 1) / Kernel::kBlockN;
  int32_t best = 1;
  float least = std::numeric_limits<float>::infinity();
  for (int32_t parts = 1; parts <= Kernel::kMostParts; ++parts) {
    const int64_t warps = int64_t{parts} * Kernel::warps(head_dim), each = (blocks + warps - 1) / warps;
    const int64_t rounds = (group_strips * parts + at_once - 1) / at_once;
    const float add_up = parts > 1 ? 4.0f + (head_dim <= 128 ? 0.1f : 0.04f) * static_cast<float>(parts) : 0.0f;
    const float time = static_cast<float>(rounds * (each + kStart)) + add_up;
    if (time < least) {
      best = parts;
      least = time;
    }
    if (each == 1) break;  // further ones have nothing to do
  }
  return best;
}

void launch_split_kv(const Call& call, const Sm80QkF16PvF16::Params& params) {
  using Kernel = Sm80QkF16PvF16SplitKv;
  const AttentionShape& shape = call.shape;
  const int32_t head_dim = call.head_dim();
  const int64_t group_strips = (group_rows(shape) + Kernel::kWarpM - 1) / Kernel::kWarpM * shape.batch * shape.kv_heads;
  Kernel::Params parted{};
  static_cast<Sm80QkF16PvF16::Params&>(parted) = params;
  parted.bfloat16 = is_bfloat16(call) ? 1 : 0;
  parted.parts = parts_of(call, group_strips);
  const int64_t rows = int64_t{shape.batch} * shape.q_heads * shape.qo_len;
  Tensor workspace;
  if (parted.parts > 1) {
    const int64_t outs = rows * parted.parts * shape.v_head_dim;
    workspace = call.empty({outs + rows * parted.parts * 2}, kFloat);
    parted.part_out = data_or_null<float>(workspace);
    parted.part_sums = parted.part_out + outs;
  }
  launch(call, "sm80_qk_f16_pv_f16_split_kv", group_strips * parted.parts, Kernel::threads(head_dim), /*overlaps_previous=*/false, &parted);
  if (parted.parts == 1) return;
  using Combine = Sm80CombineSplitKv;
  const int64_t threads = rows * ((shape.v_head_dim + Combine::kChannelsOfWarp - 1) / Combine::kChannelsOfWarp) * 32;
  launch_common(call, "sm80_combine_split_kv", (threads + Combine::kThreads - 1) / Combine::kThreads, Combine::kThreads, /*overlaps_previous=*/true,
                &parted);
}

std::tuple<Tensor, Tensor> attention_in_16_bit(Call& call, const std::optional<Tensor>& attn_mask, bool split_kv) {
  using Kernel = Sm80QkF16PvF16;
  const AttentionShape& shape = call.shape;
  const Tensor out = call.empty({call.q.size(0), call.q.size(1), call.q.size(2), shape.v_head_dim}, call.q.scalar_type());
  const Tensor lse = call.options.return_lse ? call.empty({shape.batch, shape.q_heads, shape.qo_len}, kFloat) : call.empty({0}, kFloat);
  Kernel::Params params = params_in_16_bit(call, attn_mask, out, lse);
  call.stream = current_stream(call.device());
  if (split_kv) {
    launch_split_kv(call, params);
  } else {
    const uint32_t blocks = grid_size(strips(shape) + Kernel::kWarps - 1) / Kernel::kWarps;  // of strips there are fewer than 2^31 too
    launch(call, "sm80_qk_f16_pv_f16", blocks, Kernel::kThreads, /*overlaps_previous=*/false, &params);
  }
  return {out, lse};
}

}  // namespace

std::optional<std::tuple<Tensor, Tensor>> attention_of_few_tokens(Call& call, const std::optional<Tensor>& attn_mask) {
  if (call.q.numel() == 0) return std::nullopt;
  if (call.options.or_16_bit && is_for_split_kv(call)) return attention_in_16_bit(call, attn_mask, /*split_kv=*/true);
  const bool or_pytorch = pytorch_serves(call, attn_mask);
  if (call.options.or_16_bit && is_for_16_bit(call, or_pytorch, attn_mask.has_value())) return attention_in_16_bit(call, attn_mask, /*split_kv=*/false);
  if (or_pytorch) return pytorch_attention(call, attn_mask);
  return std::nullopt;
}

}  // namespace sage
