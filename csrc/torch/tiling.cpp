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

// How long leaving parts of a tile and adding them up takes: as long as so many blocks of keys.
float time_of_parting(int32_t parts, int32_t head_dim) {
  return parts == 1 ? 0.0f : (head_dim <= 128 ? 8.0f : 17.0f) + 1.5f * static_cast<float>(parts);
}

// Shares items out among clusters that run all at once. alike: tiles see as many keys. may_part: those of a last round may be parted.
void share_out(const Call& call, int32_t multiprocessors, bool alike, bool may_part, Tiling& tiling) {
  const AttentionShape& shape = call.shape;
  const int32_t at_once = multiprocessors / tiling.cluster;
  // Tiles of the last round, which some of the clusters have and the others wait for. A tile of few rows is half of one.
  const int32_t rows = tiling.tile_rows();
  const bool last_are_short = shape.qo_len > rows && (shape.qo_len - 1) % rows < rows / 2;
  const int32_t whole_tiles = tiling.tiles - (last_are_short ? shape.batch * shape.q_heads : 0) / 2;
  const int32_t last_round = whole_tiles % at_once;
  const int32_t blocks = (shape.kv_len + QuantKInt8::kBlockN - 1) / QuantKInt8::kBlockN;
  const float tile = static_cast<float>(blocks) + kBlocksOfTile;
  const auto time_of = [&](int32_t parts) { return tile / static_cast<float>(parts) + time_of_parting(parts, call.head_dim()); };
  if (last_round > 0 && may_part) {
    const int32_t most = std::min(at_once / last_round, Sm90QkInt8PvF16::kMostParts);
    for (int32_t parts = 2; parts <= most; ++parts) {
      if (time_of(parts) < time_of(tiling.parts)) tiling.parts = parts;
    }
  }
  tiling.parted_tiles = tiling.parts > 1 ? last_round : 0;
  tiling.items = tiling.tiles + tiling.parted_tiles * (tiling.parts - 1);
  tiling.blocks = static_cast<uint32_t>(std::min(tiling.items, at_once) * tiling.cluster);
  if (alike) {
    tiling.time = static_cast<float>(whole_tiles / at_once) * tile + (last_round == 0 ? 0.0f : time_of(tiling.parts));
  } else {
    constexpr int32_t kStrip = Sm90QkInt8PvF16::kRows;
    const CausalTiles tiles{(shape.qo_len + kStrip - 1) / kStrip, rows / kStrip, blocks};
    const int64_t heads = int64_t{shape.batch} * shape.q_heads;
    // Of two for each that run at once a short one follows a long one.
    tiling.time = tiling.tiles <= 2 * at_once ? causal_rounds(tiles, heads, at_once, kBlocksOfTile, 0.6f, 9.0f)
                                              : causal_rounds(tiles, heads, at_once, kBlocksOfTile, 0.45f);
  }
}

}  // namespace

float causal_rounds(const CausalTiles& tiles, int64_t heads, int32_t at_once, float tile, float late, float latest) {
  const int64_t fewer = std::min(tiles.strips, tiles.blocks);  // strips that see fewer keys than there are
  const int64_t seen = fewer * (fewer + 1) / 2 + (tiles.strips - fewer) * tiles.blocks;
  const int64_t tiles_of_head = (tiles.strips + tiles.together - 1) / tiles.together;
  const float longest = static_cast<float>(fewer) + tile;
  if (heads * tiles_of_head <= at_once) return longest;
  const float of_head = static_cast<float>(seen) / static_cast<float>(tiles.together) + tile * static_cast<float>(tiles_of_head);
  return std::max(longest, of_head * static_cast<float>(heads) / static_cast<float>(at_once) + std::min(late * longest, latest));
}

Tiling tiling_of(const Call& call, int32_t multiprocessors, MaskForm mask) {
  const int32_t most = call.kernel.block_m(call.head_dim());
  if (!call.kernel.wgmma_int8) return tiling_with(call, most, 1);
  // A pair of blocks, unless too much of its time one would have no rows or wait for keys that only the other's see.
  const bool causal = call.options.is_causal;
  const int32_t row_blocks = (call.shape.qo_len + most - 1) / most;
  constexpr int64_t kLong = 768;  // of packed sequences, in the mean; two heads share a pair where one ends
  const bool pairs = call.packed() ? !causal && call.shape.q_heads % 2 == 0 && call.shape.qo_len >= kLong * call.shape.batch
                     : causal      ? row_blocks >= 20
                                   : row_blocks % 2 == 0 || row_blocks >= 16;
  Tiling tiling = tiling_with(call, most, pairs && mask != MaskForm::kBool ? 2 : 1);
  const bool hides = mask == MaskForm::kBoolOfKeys || mask == MaskForm::kBool;  // numbers hide little, as a rule
  const bool known = !hides && !call.packed();                                   // how long a tile takes
  const bool alike = known && !causal, may_part = alike && mask == MaskForm::kNone;
  share_out(call, multiprocessors, alike, may_part, tiling);
  constexpr int32_t kFewer = 2 * Sm90QkInt8PvF16::kRows;
  if (most <= kFewer || call.packed()) return tiling;
  // Two warpgroups of three take three quarters of the time for two thirds of the rows: less, where such tiles need few rounds. (So
  // measured where rounds are many; a margin is added.)
  Tiling fewer = tiling_with(call, kFewer, 1);
  share_out(call, multiprocessors, alike, may_part, fewer);
  fewer.time *= call.head_dim() <= 64 ? 0.80f : 0.77f;
  return (known ? fewer.time < tiling.time : fewer.tiles <= multiprocessors) ? fewer : tiling;
}

}  // namespace sage
