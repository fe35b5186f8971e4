#include "torch/few_tokens.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "kernels/attention/sm80_combine_split_kv.h"
#include "kernels/attention/sm80_qk_f16_pv_f16_split_kv_staged.h"
#include "torch/expected_time.h"
#include "torch/hopper_in_16_bits.h"
#include "torch/mask.h"

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

// How many run at once.
int64_t warps_at_once(const Call& call) {
  return int64_t{runtime::KernelStore::get().device(call.device()).multiprocessors} * Sm80QkF16PvF16::warps_per_sm(call.head_dim());
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

// Rows that share K and V: of a group of heads.
int64_t group_rows(const AttentionShape& shape) { return int64_t{shape.q_heads / shape.kv_heads} * shape.qo_len; }

// Whether reading keys once, each by some warp, is all that such a call takes: as next to all that a language model writes. Few of them are the other
// kernel's, unless it would read them once for each of many heads.
bool is_for_split_kv(const Call& call) {
  using Kernel = Sm80QkF16PvF16SplitKv;
  const AttentionShape& shape = call.shape;
  if (group_rows(shape) > (call.kernel.wgmma_int8 ? Kernel::kMostRowsWhereShared : Kernel::kMostRows) || !rows_are_even(call)) return false;
  return shape.kv_len > Sm80QkF16PvF16::most_keys(call.head_dim()) || (shape.q_heads > shape.kv_heads && strips(shape) > warps_at_once(call));
}

Sm80QkF16PvF16::Params params_in_16_bit(const Call& call, const std::optional<Tensor>& attn_mask, const Tensor& out, const Tensor& lse) {
  const AttentionShape& shape = call.shape;
  Sm80QkF16PvF16::Params params{};
  fill_in(call, out, lse, params);
  params.k = view(call.k, shape.heads_first);
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

// How a strip's keys are shared out: among so many warps of so many blocks of threads. But the warps of some blocks have a strip each.
struct SplitKv {
  int32_t warps = 1, parts = 1, whole_blocks = 0;
  bool cluster = false;  // these blocks are one, which adds parts up itself
  bool staged = false;   // K and V come by way of shared memory
};

// Whether a strip's blocks of threads are a cluster: on Hopper, the only GPU with clusters that was measured. Larger ones than pairs may have to wait
// for others to end, as no whole number of them fills the multiprocessors that reach each other: so only where these are far from `full`.
bool is_cluster(const Call& call, int32_t warps, int32_t parts, float full) {
  using Kernel = Sm80QkF16PvF16SplitKv;
  if (!call.kernel.wgmma_int8) return false;
  if (parts == 2) return warps == Kernel::most_warps(call.head_dim());
  return (parts == 4 || parts == Kernel::kMostPartsOfCluster) && warps >= 4 && full <= 0.4f;
}

// Microseconds, fitted to what 380 sizes took on an H200, and 255 in clusters; then, of less full multiprocessors, to 95 on an H100, whose keys
// were not in the L2 cache (bench/notes-short.md).
struct SplitKvCosts {
  int32_t head_dim;               // up to which
  float block, block_where_full;  // of keys, for a warp; and where as many run as can at once
  float least_of_block;           // what memory takes to answer
  float warp;                     // of several of a block of threads
  float add_up, part, rows;       // of adding parts up by a kernel: at all, for each, and for a thousand rows of each
  float pair;                     // by a cluster of two
};
constexpr SplitKvCosts kSplitKvCosts[] = {
    {64, 0.4f, 1.8f, 0.84f, 0.22f, 2.15f, 0.1f, 0.04f, 1.65f},
    {128, 0.4f, 1.0f, 0.69f, 0.26f, 1.79f, 0.04f, 0.39f, 1.02f},
    {256, 1.65f, 4.9f, 3.07f, 0.83f, 1.25f, 0.14f, 1.03f, 0.11f},
};

// What takes least time. Of numbers of parts some will do.
SplitKv split_kv_of(const Call& call, int64_t group_strips) {
  using Kernel = Sm80QkF16PvF16SplitKv;
  using Staged = Sm80QkF16PvF16SplitKvStaged;
  constexpr float kStart = 0.5f;       // of a block of threads
  constexpr float kOfCluster = 0.15f;  // of each beyond a pair
  constexpr int32_t kParts[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, Kernel::kMostParts};
  const AttentionShape& shape = call.shape;
  const int32_t head_dim = call.head_dim(), most_warps = Kernel::most_warps(head_dim), blocks = 1 + (shape.kv_len - 1) / Kernel::kBlockN;
  const SplitKvCosts& costs =
      *std::find_if(std::begin(kSplitKvCosts), std::end(kSplitKvCosts) - 1, [&](const SplitKvCosts& some) { return head_dim <= some.head_dim; });
  const float thousand_rows = static_cast<float>(int64_t{shape.batch} * shape.q_heads * shape.qo_len) / 1000.0f;
  const int64_t at_once = warps_at_once(call);
  // How full so many strips make all multiprocessors, in rounds; how long they take.
  const auto full_of = [&](int64_t strips, int32_t sharers) { return static_cast<float>(strips * sharers) / static_cast<float>(at_once); };
  const auto time_of = [&](int64_t strips, int32_t warps, int32_t parts) {
    const float full = full_of(strips, warps * parts);
    const int32_t each = (blocks + warps * parts - 1) / (warps * parts);
    const float rounds = (std::ceil(full) + std::max(full, 1.0f)) / 2.0f;  // neither one after the other nor without an end
    const float block = std::max(costs.least_of_block, costs.block + (costs.block_where_full - costs.block) * std::min(full, 1.0f));
    return rounds * (static_cast<float>(each) * block + kStart + (warps == 1 ? 0.0f : costs.warp * static_cast<float>(warps)));
  };
  SplitKv best;
  float least = std::numeric_limits<float>::infinity();
  const auto consider = [&](const SplitKv& one, float time) {
    if (time >= least) return;
    best = one;
    least = time;
  };
  for (const int32_t parts : kParts) {
    for (int32_t warps = most_warps; warps >= 1; warps /= 2) {
      const float full = full_of(group_strips, warps * parts);
      if (parts > 1 && (full > 1.3f || (parts - 1) * warps >= blocks)) continue;
      const bool cluster = is_cluster(call, warps, parts, full);
      const float combining = cluster ? costs.pair + kOfCluster * static_cast<float>(parts - 2)
                                      : costs.add_up + (costs.part + costs.rows * thousand_rows) * static_cast<float>(parts);
      consider({warps, parts, 0, cluster}, time_of(group_strips, warps, parts) + (parts == 1 ? 0.0f : combining));
    }
  }
  // Rounds that fill all multiprocessors with strips of a warp's own, which adds nothing up, and then one of shared ones.
  const int64_t rounds = group_strips / at_once, rest = group_strips % at_once;
  const bool some_are_whole = rounds > 0 && rest > 0 && group_strips <= std::numeric_limits<int32_t>::max();  // beyond, there are too many blocks of threads
  for (int32_t warps = most_warps; some_are_whole && warps > 1; warps /= 2) {
    const float whole = static_cast<float>(rounds) * (static_cast<float>(blocks) * costs.block_where_full + kStart);
    consider({warps, 1, static_cast<int32_t>(rounds * (at_once / warps))}, whole + time_of(rest, warps, 1));
  }
  const int32_t sharers = best.warps * best.parts;
  const int64_t bytes_of_warp = int64_t{(blocks + sharers - 1) / sharers} * Staged::stage_bytes(head_dim);
  best.staged = group_strips * sharers > at_once || bytes_of_warp > Staged::kMostUnstagedBytes;
  return best;
}

void launch_split_kv(const Call& call, const Sm80QkF16PvF16::Params& params) {
  using Kernel = Sm80QkF16PvF16SplitKv;
  const AttentionShape& shape = call.shape;
  const int32_t head_dim = call.head_dim();
  const int64_t group_strips = (group_rows(shape) + Kernel::kWarpM - 1) / Kernel::kWarpM * shape.batch * shape.kv_heads;
  const SplitKv split = split_kv_of(call, group_strips);
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
  const int64_t parted_strips = group_strips - int64_t{split.whole_blocks} * split.warps;
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
  if (call.q.numel() == 0) return std::nullopt;
  if (call.options.or_16_bit && is_for_split_kv(call)) return attention_in_16_bit(call, attn_mask, /*split_kv=*/true);
  const bool in_16_bits = call.options.or_16_bit && call.kernel.wgmma_int8 && can_in_16_bits(call, attn_mask);
  if (call.options.or_16_bit && is_for_16_bit(call, in_16_bits)) return attention_in_16_bit(call, attn_mask, /*split_kv=*/false);
  if (!in_16_bits) return std::nullopt;
  const int32_t rows = faster_in_16_bits(call, form_of(call, attn_mask), runtime::KernelStore::get().device(call.device()).multiprocessors);
  if (rows == 0) return std::nullopt;
  const auto [out, lse] = call.outputs();
  call.stream = current_stream(call.device());
  attend_in_16_bits(call, attn_mask, rows, out, lse);
  return std::tuple{out, lse};
}

}  // namespace sage
