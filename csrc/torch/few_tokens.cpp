#include "torch/few_tokens.h"

#include "kernels/attention/sm80_combine_split_kv.h"
#include "kernels/attention/sm80_qk_f16_pv_f16_split_kv_staged.h"
#include "torch/hopper_in_16_bits.h"
#include "torch/mask.h"
#include "torch/plan/faster_in_16_bits.h"
#include "torch/plan/split_kv.h"

namespace sage {

namespace {

bool is_bfloat16(const Call& call) { return call.q.scalar_type() == kBFloat16; }

// Rows of all start on 16 bytes.
bool rows_are_even(const Call& call) {
  for (const Tensor* tensor : {&call.q, &call.k, &call.v}) {
    if (!call.view(*tensor).aligned16) return false;
  }
  return true;
}

// 16 rows each, for a warp of the 16-bit kernel.
int64_t strips(const AttentionShape& shape) {
  return int64_t{shape.batch} * shape.q_heads * ((shape.qo_len + Sm80QkF16PvF16::kWarpM - 1) / Sm80QkF16PvF16::kWarpM);
}

// Whether the 16-bit kernel is faster than others of ours. Hopper's share K and V among more rows: this one is beside them for fewer keys and queries.
// beside_hoppers: that in 16 bits is the other; then for half as many keys, or for calls that take about as long as a launch.
bool is_for_16_bit(const Call& call, bool beside_hoppers) {
  using Kernel = Sm80QkF16PvF16;
  const AttentionShape& shape = call.shape;
  const int32_t head_dim = call.head_dim(), most_keys = Kernel::most_keys(head_dim);
  const bool shares = beside_hoppers || (call.kernel.wgmma_int8 && head_dim > 64);
  if (shape.qo_len > (shares ? Kernel::kMostQueriesWhereShared : Kernel::kMostQueries) || shape.kv_len > most_keys) return false;
  return rows_are_even(call) && (!beside_hoppers || shape.kv_len <= most_keys / 2 || strips(shape) <= 512);
}

// Whether reading keys once, each by some warp, is all that such a call takes: as next to all that a language model writes. Few of them are the other
// kernel's, unless it would read them once for each of many heads.
bool is_for_split_kv(const Call& call) {
  using Kernel = Sm80QkF16PvF16SplitKv;
  const AttentionShape& shape = call.shape;
  if (group_rows(shape) > (call.kernel.wgmma_int8 ? Kernel::kMostRowsWhereShared : Kernel::kMostRows) || !rows_are_even(call)) return false;
  return shape.kv_len > Sm80QkF16PvF16::most_keys(call.head_dim()) || (shape.q_heads > shape.kv_heads && strips(shape) > warps_at_once(call.head_dim(), call.multiprocessors()));
}

Sm80QkF16PvF16::Params params_in_16_bit(const Call& call, const std::optional<Tensor>& attn_mask, const Tensor& out, const Tensor& lse) {
  const AttentionShape& shape = call.shape;
  Sm80QkF16PvF16::Params params{};
  fill_in(call, out, lse, params);
  params.k = call.view(call.k);
  if (attn_mask.has_value()) {
    params.mask = described(call, *attn_mask);
    params.mask_together = has_even_rows(params.mask, static_cast<int64_t>(attn_mask->element_size())) ? 1 : 0;
  }
  // Of float16 so high that keys of little weight keep some bits, and below 8, since what is subtracted from a score of 2^27 may round to twice
  // itself; of bfloat16 so low that sums of so many have room.
  params.level = is_bfloat16(call) ? 0.0f : 7.0f;
  for (int64_t keys = 1; is_bfloat16(call) && keys < shape.kv_len; keys *= 2) params.level -= 1.0f;
  return params;
}

void launch_split_kv(const Call& call, const Sm80QkF16PvF16::Params& params) {
  using Kernel = Sm80QkF16PvF16SplitKv;
  const AttentionShape& shape = call.shape;
  const int32_t head_dim = call.head_dim();
  const SplitKv split = split_kv_of(call, call.multiprocessors());
  Kernel::Params parted{};
  static_cast<Sm80QkF16PvF16::Params&>(parted) = params;
  parted.bfloat16 = is_bfloat16(call) ? 1 : 0;
  parted.whole_blocks = split.whole_blocks;
  parted.parts = split.parts;
  const int64_t rows = int64_t{shape.batch} * shape.q_heads * shape.qo_len;
  const bool combines = split.parts > 1 && !split.cluster;
  Tensor workspace;
  if (combines) {
    const int64_t outs = rows * split.parts * shape.v_head_dim;
    workspace = call.empty({outs + rows * split.parts * 2}, kFloat);
    parted.part_out = data_or_null<float>(workspace);
    parted.part_sums = parted.part_out + outs;
  }
  const int64_t parted_strips = group_strips(shape) - int64_t{split.whole_blocks} * split.warps;
  const int32_t shared_bytes =
      split.staged ? Sm80QkF16PvF16SplitKvStaged::shared_bytes(head_dim, split.warps) : Kernel::shared_bytes(head_dim, split.warps);
  launch(call, split.staged ? "sm80_qk_f16_pv_f16_split_kv_staged" : "sm80_qk_f16_pv_f16_split_kv", split.whole_blocks + parted_strips * split.parts,
         split.warps * 32, &parted, shared_bytes, split.cluster ? split.parts : 1);
  if (!combines) return;
  using Combine = Sm80CombineSplitKv;
  const int64_t threads = rows * ((shape.v_head_dim + Combine::kChannelsOfWarp - 1) / Combine::kChannelsOfWarp) * 32;
  launch_common(call, "sm80_combine_split_kv", (threads + Combine::kThreads - 1) / Combine::kThreads, Combine::kThreads, &parted);
}

std::tuple<Tensor, Tensor> attention_in_16_bit(Call& call, const std::optional<Tensor>& attn_mask, bool split_kv) {
  using Kernel = Sm80QkF16PvF16;
  const AttentionShape& shape = call.shape;
  const auto [out, lse] = call.outputs();
  Kernel::Params params = params_in_16_bit(call, attn_mask, out, lse);
  call.stream = current_stream(call.device());
  if (split_kv) {
    launch_split_kv(call, params);
  } else {
    const uint32_t blocks = grid_size(strips(shape) + Kernel::kWarps - 1) / Kernel::kWarps;  // of strips there are fewer than 2^31 too
    launch(call, "sm80_qk_f16_pv_f16", blocks, Kernel::kThreads, &params, Kernel::shared_bytes(call.head_dim()));
  }
  return {out, lse};
}

}  // namespace

std::optional<std::tuple<Tensor, Tensor>> attention_of_few_tokens(Call& call, const std::optional<Tensor>& attn_mask) {
  if (!call.options.or_16_bit || call.q.numel() == 0) return std::nullopt;
  if (is_for_split_kv(call)) return attention_in_16_bit(call, attn_mask, /*split_kv=*/true);
  const bool in_16_bits = call.kernel.wgmma_int8 && can_in_16_bits(call, attn_mask);
  if (is_for_16_bit(call, in_16_bits)) return attention_in_16_bit(call, attn_mask, /*split_kv=*/false);
  if (!in_16_bits) return std::nullopt;
  const int32_t rows = faster_in_16_bits(call, form_of(call, attn_mask), call.multiprocessors());
  if (rows == 0) return std::nullopt;
  const auto [out, lse] = call.outputs();
  call.stream = current_stream(call.device());
  attend_in_16_bits(call, attn_mask, rows, out, lse);
  return std::tuple{out, lse};
}

}  // namespace sage
