#include "torch/plan/tiles_in_16_bits.h"

#include <algorithm>
#include <numeric>

#include "kernels/attention/sm90_qk_f16_pv_f16.h"

namespace sage {

namespace {

using Kernel = Sm90QkF16PvF16;

// Microseconds on an H200, fitted to 1,300 times of head_dims to 128, and 300 of wider ones (bench/notes-short.md): of a tile's block of 64 keys and of what it takes
// beside; and where a block of threads has two teams, of two tiles at the same time.
struct TileCosts {
  float block, tile;
  float blocks_of_two = 0.0f, two_tiles = 0.0f;
};
struct CostsIn16Bits {
  float start;         // of any call
  TileCosts tiles[3];  // by how many warpgroups have rows, less one
  struct {
    float block, tile;  // as many times as long; longer
    float blocks_of_two = 0.0f;
  } masks[4];  // in MaskForm's order, the last of all numbers but those of keys: fitted to 970 times, and to 370 that are no numbers of rows
};
constexpr CostsIn16Bits kCostsIn16Bits[] = {  // of head_dims to 64, 128, 192, 256
    {4.02f, {{0.448f, 0.445f, 0.641f, 1.164f}, {0.620f, 0.483f, 1.007f, 1.547f}}, {{1.35f, 1.4f, 1.35f}, {1.55f, 1.4f, 1.55f}, {1.5f, 1.0f, 1.5f}, {1.93f, 0.7f, 1.66f}}},
    {3.09f, {{0.613f, 1.498f}, {0.830f, 1.920f}, {1.071f, 2.287f}}, {{1.3f, 0.8f}, {1.4f, 1.4f}, {1.4f, 0.6f}, {1.45f, 1.1f}}},
    {0.97f, {{0.705f, 4.14f}, {0.987f, 4.88f}}, {{1.2f, 0.6f}, {1.3f, 0.6f}, {1.4f, -0.4f}, {1.37f, 1.0f}}},
    {0.0f, {{0.885f, 5.6f}, {1.34f, 6.0f}}, {{1.15f, 0.4f}, {1.25f, -0.6f}, {1.2f, 0.6f}, {1.29f, 1.1f}}},
};

CostsIn16Bits costs_of(int32_t head_dim, MaskForm mask) {
  CostsIn16Bits costs = kCostsIn16Bits[head_dim / 64 - 1];
  if (mask == MaskForm::kNone) return costs;
  const auto& more = costs.masks[std::min(static_cast<int32_t>(mask) - 1, 3)];
  for (TileCosts& of : costs.tiles) {
    of.block *= more.block;
    of.tile += more.tile;
    of.blocks_of_two *= more.blocks_of_two;
    of.two_tiles += more.tile;
  }
  return costs;
}

// Long calls take longer, as the card's clock falls, but not where bools, or numbers of keys, are looked at beside the products; under a causal mask
// warpgroups of a tile wait for each other besides, and where heads are wide and tiles many, these for their Q.
float slowdown(float time, int32_t rows, bool is_causal, bool wide, MaskForm mask) {
  if (is_causal && wide) return std::clamp(0.008f * (time - 45.0f), 0.0f, 0.25f);
  if (is_causal) return rows > 128 ? std::min(0.25f, 0.0013f * time) : std::min(0.12f, 0.0006f * time);
  if (mask != MaskForm::kNone && mask < MaskForm::kNumbers) return 0.0f;
  return std::clamp((rows > 128 ? 0.0017f : 0.0008f) * (time - 40.0f), 0.0f, rows > 128 ? 0.12f : 0.08f);
}

// How long a tile takes: by itself, or where its block of threads has two teams beside another tile, of which half the time of both is its own.
float time_of_tile(const CostsIn16Bits& costs, int32_t rows, int32_t blocks, bool alone) {
  const TileCosts& of = costs.tiles[(rows - 1) / Kernel::kRows];
  const auto seen = static_cast<float>(blocks);
  const bool has_two_teams = of.blocks_of_two > 0.0f;
  return alone || !has_two_teams ? of.block * seen + of.tile : (of.blocks_of_two * seen + of.two_tiles) / 2.0f;
}

// How long the tiles of the multiprocessor that has most take, which are handed out in turn.
float time_of_busiest(const AttentionShape& shape, int32_t rows, int32_t multiprocessors, const CostsIn16Bits& costs) {
  const int32_t of_head = tiles_of_head(shape, rows), blocks = (shape.kv_len - 1) / Kernel::kBlockN + 1;
  const int64_t mine = (int64_t{shape.batch} * shape.q_heads * of_head - 1) / multiprocessors + 1, last = mine / of_head, others = mine - last;
  const int32_t last_rows = shape.qo_len - (of_head - 1) * rows, odd = others > 0 ? rows : last_rows;
  const auto time = [&](int32_t its_rows, bool alone) { return time_of_tile(costs, its_rows, blocks, alone); };
  const float in_pairs = static_cast<float>(others) * time(rows, false) + static_cast<float>(last) * time(last_rows, false);
  return mine % 2 == 0 ? in_pairs : in_pairs + time(odd, true) - time(odd, false);
}

// The same of one of the multiprocessors under a causal mask, where tiles of all heads are computed one beside the other: the last rows take longest.
float time_of_causal_at(const AttentionShape& shape, int32_t rows, int32_t multiprocessors, int64_t multiprocessor, const CostsIn16Bits& costs) {
  const int64_t heads = int64_t{shape.batch} * shape.q_heads, of_head = tiles_of_head(shape, rows);
  const int64_t mine = (of_head * heads - multiprocessor + multiprocessors - 1) / multiprocessors;
  const int32_t blocks = (shape.kv_len - 1) / Kernel::kBlockN + 1;
  constexpr int64_t kLookedAt = 16;  // at most: of more those are alike that follow each other
  const int64_t step = (mine + kLookedAt - 1) / kLookedAt;
  float time = 0.0f;
  for (int64_t i = 0; i < mine; i += step) {
    const auto first_row = static_cast<int32_t>(of_head - 1 - (multiprocessor + i * multiprocessors) / heads) * rows;
    const int32_t its_rows = std::min(rows, shape.qo_len - first_row), seen = std::min(blocks, (first_row + its_rows - 1) / Kernel::kBlockN + 1);
    const bool alone = step == 1 && i == mine - 1 && mine % 2 == 1;
    time += time_of_tile(costs, its_rows, seen, alone) * static_cast<float>(std::min(step, mine - i));
  }
  return time;
}

}  // namespace

TilesIn16Bits tiles_in_16_bits(const AttentionShape& shape, bool is_causal, MaskForm mask, int32_t multiprocessors) {
  const int32_t head_dim = head_dim_in_16_bits(shape);
  const CostsIn16Bits costs = costs_of(head_dim, mask);
  TilesIn16Bits best{};
  for (int32_t rows = Kernel::block_m(head_dim); rows > 0; rows -= Kernel::kRows) {
    const int64_t tiles = int64_t{shape.batch} * shape.q_heads * tiles_of_head(shape, rows);
    // Short tiles read K and V more often: where these are few, and not of head_dims to 128 whose channels are no whole boxes of the copy engine's, which takes
    // longer for such.
    const bool uneven = head_dim <= 128 && (shape.head_dim % 64 != 0 || shape.v_head_dim % 64 != 0);
    if (best.rows != 0 && rows == Kernel::kRows && (tiles > 4 * multiprocessors || uneven)) break;
    float time = 0.0f;
    if (is_causal) {
      // The one with the last tile, the one that has as many or one less, and the one with the longest.
      const int64_t last = (tiles - 1) % multiprocessors, next = tiles > multiprocessors ? (last + 1) % multiprocessors : last;
      for (const int64_t one : {int64_t{0}, last, next}) time = std::max(time, time_of_causal_at(shape, rows, multiprocessors, one, costs));
    } else {
      time = time_of_busiest(shape, rows, multiprocessors, costs);
    }
    time += costs.start;
    time *= 1.0f + slowdown(time, rows, is_causal, head_dim > 128, mask);
    if (best.rows == 0 || time < best.time) best = {rows, time};
  }
  return best;
}

int32_t heads_in_turn(int32_t tiles_of_head, int32_t multiprocessors) {
  int32_t heads = 1;
  while (multiprocessors % heads != 0 || std::gcd(multiprocessors / heads, tiles_of_head) != 1) ++heads;
  return heads;
}

}  // namespace sage
