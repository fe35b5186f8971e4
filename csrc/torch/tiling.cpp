#include "torch/tiling.h"

#include <algorithm>

#include "kernels/attention/sm90_qk_int8_pv_f16.h"
#include "kernels/sequences.h"

namespace sage {

namespace {

Tiling tiling_with(const Call& call, int32_t block_rows, int32_t cluster) {
  const AttentionShape& shape = call.shape;
  Tiling tiling;
  tiling.block_rows = block_rows;
  tiling.cluster = cluster;
  const int32_t rows = tiling.tile_rows();
  // Of packed queries those beyond the last sequence count as one more.
  const int64_t tiles =
      call.packed() ? slots(shape.qo_len, shape.batch + 1, rows) : int64_t{shape.batch} * ((shape.qo_len + rows - 1) / rows);
  tiling.tiles = static_cast<int32_t>(grid_size(tiles * shape.q_heads));
  tiling.blocks = grid_size(int64_t{tiling.tiles} * cluster);
  return tiling;
}

// Shares items out among clusters that run all at once. Returns how long that takes: in tiles' blocks of 64 keys, where all tiles see all keys.
float share_out(const Call& call, int32_t multiprocessors, bool all_see_all, Tiling& tiling) {
  // What a tile takes beside its keys, and leaving parts of one and adding them up: as long as so many blocks of keys.
  constexpr int32_t kBlocksOfTile = 4, kBlocksOfParting = 12;
  const AttentionShape& shape = call.shape;
  const int32_t at_once = multiprocessors / tiling.cluster;
  // Tiles of the last round, which some of the clusters have and the others wait for. A tile of few rows is half of one.
  const int32_t rows = tiling.tile_rows();
  const int32_t short_tiles = (shape.qo_len - 1) % rows < rows / 2 ? shape.batch * shape.q_heads : 0;
  const int32_t whole_tiles = tiling.tiles - short_tiles / 2;
  const int32_t last_round = whole_tiles % at_once;
  const int32_t blocks = (shape.kv_len + QuantKInt8::kBlockN - 1) / QuantKInt8::kBlockN;
  if (last_round > 0 && all_see_all) {
    tiling.parts = std::min(at_once / last_round, Sm90QkInt8PvF16::kMostParts);
    if (blocks * (tiling.parts - 1) < kBlocksOfParting * tiling.parts) tiling.parts = 1;
  }
  tiling.parted_tiles = tiling.parts > 1 ? last_round : 0;
  tiling.items = tiling.tiles + tiling.parted_tiles * (tiling.parts - 1);
  tiling.blocks = static_cast<uint32_t>(std::min(tiling.items, at_once) * tiling.cluster);
  const auto tile = static_cast<float>(blocks + kBlocksOfTile);
  const float last = last_round == 0 ? 0.0f : tile / static_cast<float>(tiling.parts);
  return static_cast<float>(whole_tiles / at_once) * tile + last + (tiling.parts > 1 ? kBlocksOfParting * 2.0f / 3.0f : 0.0f);
}

}  // namespace

Tiling tiling_of(const Call& call, int32_t multiprocessors, bool masked) {
  const int32_t most = call.kernel.block_m(call.head_dim());
  if (!call.kernel.persistent) return tiling_with(call, most, 1);
  // A pair of blocks, unless too much of its time one would have no rows or, under a causal mask, wait for the other's keys.
  const int32_t row_blocks = (call.shape.qo_len + most - 1) / most;
  const bool even = row_blocks % 2 == 0 && !call.options.is_causal;
  Tiling tiling = tiling_with(call, most, !call.packed() && (even || row_blocks >= 16) ? 2 : 1);
  const bool all_see_all = !masked && !call.packed() && !call.options.is_causal;
  const float time = share_out(call, multiprocessors, all_see_all, tiling);
  constexpr int32_t kFewer = 2 * Sm90QkInt8PvF16::kRows;
  if (most <= kFewer || call.packed()) return tiling;
  // Two warpgroups of three take three quarters of the time for two thirds of the rows: less, where such tiles need few rounds. (So
  // measured where rounds are many; a margin is added.)
  const float time_of_two = call.head_dim() <= 64 ? 0.80f : 0.77f;
  Tiling fewer = tiling_with(call, kFewer, 1);
  const float time_of_fewer = share_out(call, multiprocessors, all_see_all, fewer);
  return (all_see_all ? time_of_fewer * time_of_two < time : fewer.tiles <= multiprocessors) ? fewer : tiling;
}

}  // namespace sage
