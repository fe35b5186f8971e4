#include "torch/plan/split_kv.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "kernels/attention/sm80_qk_f16_pv_f16_split_kv_staged.h"

namespace sage {

namespace {

using SplitKvKernel = Sm80QkF16PvF16SplitKv;

// Whether a strip's blocks of threads are a cluster: on Hopper, the only GPU with clusters that was measured. Larger ones than pairs may have to wait
// for others to end, as no whole number of them fills the multiprocessors that reach each other: so only where these are far from `full`.
bool is_cluster(const Call& call, int32_t warps, int32_t parts, float full) {
  if (!call.kernel.wgmma_int8) return false;
  if (parts == 2) return warps == SplitKvKernel::most_warps(call.head_dim());
  return (parts == 4 || parts == SplitKvKernel::kMostPartsOfCluster) && warps >= 4 && full <= 0.4f;
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

}  // namespace

int64_t group_rows(const AttentionShape& shape) { return int64_t{shape.q_heads / shape.kv_heads} * shape.qo_len; }

int64_t group_strips(const AttentionShape& shape) {
  return (group_rows(shape) + SplitKvKernel::kWarpM - 1) / SplitKvKernel::kWarpM * shape.batch * shape.kv_heads;
}

int64_t warps_at_once(int32_t head_dim, int32_t multiprocessors) { return int64_t{multiprocessors} * Sm80QkF16PvF16::warps_per_sm(head_dim); }

SplitKv split_kv_of(const Call& call, int32_t multiprocessors) {
  using Staged = Sm80QkF16PvF16SplitKvStaged;
  constexpr float kStart = 0.5f;       // of a block of threads
  constexpr float kOfCluster = 0.15f;  // of each beyond a pair
  constexpr int32_t kParts[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, SplitKvKernel::kMostParts};
  const AttentionShape& shape = call.shape;
  const int64_t strips = group_strips(shape);
  const int32_t head_dim = call.head_dim(), most_warps = SplitKvKernel::most_warps(head_dim), blocks = 1 + (shape.kv_len - 1) / SplitKvKernel::kBlockN;
  const SplitKvCosts& costs =
      *std::find_if(std::begin(kSplitKvCosts), std::end(kSplitKvCosts) - 1, [&](const SplitKvCosts& some) { return head_dim <= some.head_dim; });
  const float thousand_rows = static_cast<float>(int64_t{shape.batch} * shape.q_heads * shape.qo_len) / 1000.0f;
  const int64_t at_once = warps_at_once(head_dim, multiprocessors);
  // How full so many strips make all multiprocessors, in rounds; how long they take.
  const auto full_of = [&](int64_t some, int32_t sharers) { return static_cast<float>(some * sharers) / static_cast<float>(at_once); };
  const auto time_of = [&](int64_t some, int32_t warps, int32_t parts) {
    const float full = full_of(some, warps * parts);
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
      const float full = full_of(strips, warps * parts);
      if (parts > 1 && (full > 1.3f || (parts - 1) * warps >= blocks)) continue;
      const bool cluster = is_cluster(call, warps, parts, full);
      const float combining = cluster ? costs.pair + kOfCluster * static_cast<float>(parts - 2)
                                      : costs.add_up + (costs.part + costs.rows * thousand_rows) * static_cast<float>(parts);
      consider({warps, parts, 0, cluster}, time_of(strips, warps, parts) + (parts == 1 ? 0.0f : combining));
    }
  }
  // Rounds that fill all multiprocessors with strips of a warp's own, which adds nothing up, and then one of shared ones.
  const int64_t rounds = strips / at_once, rest = strips % at_once;
  const bool some_are_whole = rounds > 0 && rest > 0 && strips <= std::numeric_limits<int32_t>::max();  // beyond, there are too many blocks of threads
  for (int32_t warps = most_warps; some_are_whole && warps > 1; warps /= 2) {
    const float whole = static_cast<float>(rounds) * (static_cast<float>(blocks) * costs.block_where_full + kStart);
    consider({warps, 1, static_cast<int32_t>(rounds * (at_once / warps))}, whole + time_of(rest, warps, 1));
  }
  const int32_t sharers = best.warps * best.parts;
  const int64_t bytes_of_warp = int64_t{(blocks + sharers - 1) / sharers} * Staged::stage_bytes(head_dim);
  best.staged = strips * sharers > at_once || bytes_of_warp > Staged::kMostUnstagedBytes;
  return best;
}

}  // namespace sage
