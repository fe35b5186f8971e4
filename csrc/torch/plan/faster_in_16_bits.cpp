#include "torch/plan/faster_in_16_bits.h"

#include <algorithm>
#include <iterator>

#include "torch/plan/tiles_in_16_bits.h"
#include "torch/plan/tiling.h"

namespace sage {

namespace {

// Microseconds under load of the kernel that quantises, fitted to the shapes of bench/results/h200-short.json on two H200s and an H100, and to 550 under masks on an H200
// (bench/notes-short.md).
struct Costs {
  int32_t head_dim;  // up to which
  float start, k;    // of any call; of 1000 tokens of a head of K, quantised
  float block[3];    // of a unit of Tiling::time: without a mask, with a causal one, with another
  struct {
    float block, tile;  // as many times as long a block; what a tile takes besides, in such units
  } masks[4];           // in MaskForm's order. One of rows hides half as a rule, but for numbers
};
constexpr Costs kCosts[] = {
    {64, 5.16f, 0.036f, {0.671f, 0.640f, 0.646f}, {{1.02f, 1.8f}, {0.60f, 5.3f}, {1.17f, 1.9f}, {1.05f, 0.0f}}},
    {128, 4.85f, 0.079f, {0.949f, 0.864f, 0.873f}, {{0.97f, 2.6f}, {0.53f, 7.3f}, {1.08f, 2.8f}, {1.05f, 0.0f}}},
    {192, 5.35f, 0.272f, {1.000f, 0.957f, 0.967f}, {{0.82f, 5.2f}, {0.65f, 3.6f}, {0.96f, 4.8f}, {1.05f, 0.0f}}},
    {256, 4.34f, 0.383f, {1.092f, 0.997f, 1.056f}, {{0.87f, 5.7f}, {0.39f, 8.8f}, {0.96f, 5.3f}, {1.05f, 0.0f}}},
};
constexpr float kLook = 5.0f;  // of the kernel that looks at a mask
// Of calls that take less microseconds, what does not quantise is taken where it is so much slower, too: it is one launch, and more exact.
constexpr float kShort = 40.0f, kOneLaunch = 1.05f;

float time_quantised(const Call& call, MaskForm mask, int32_t multiprocessors) {
  const AttentionShape& shape = call.shape;
  const int32_t head_dim = std::max(shape.head_dim, shape.v_head_dim);
  const Costs& costs = *std::find_if(std::begin(kCosts), std::end(kCosts) - 1, [&](const Costs& some) { return head_dim <= some.head_dim; });
  const float before = costs.start + costs.k * static_cast<float>(int64_t{shape.batch} * shape.kv_heads * shape.kv_len) / 1000.0f;
  // As of numbers, whose tiles are not parted: what is hidden nobody knows.
  const float blocks = tiling_of(call, multiprocessors, mask == MaskForm::kNone ? mask : MaskForm::kNumbers).time;
  const float block = costs.block[call.options.is_causal ? 1 : mask == MaskForm::kNone ? 0 : 2];
  if (mask == MaskForm::kNone) return before + block * blocks;
  const auto& under = costs.masks[static_cast<int32_t>(mask) - 1];
  const auto blocks_of_tile = static_cast<float>((shape.kv_len - 1) / QuantKInt8::kBlockN + 1) + kBlocksOfTile;
  return before + kLook + block * (under.block * blocks + under.tile * blocks / blocks_of_tile);
}

}  // namespace

int32_t faster_in_16_bits(const Call& call, MaskForm mask, int32_t multiprocessors) {
  if (!call.kernel.wgmma_int8) return 0;
  const TilesIn16Bits tiles = tiles_in_16_bits(call.shape, call.options.is_causal, mask, multiprocessors);
  // With few keys memory is the limit, and quantising them something on top. A number for each score and head adds to them, as a rule, and eight bits are in the
  // way of that: twice as slow.
  constexpr int32_t kFewKeys = 128;
  if (call.shape.kv_len <= kFewKeys || mask == MaskForm::kNumbersOfHeads) return tiles.rows;
  const float quantised = time_quantised(call, mask, multiprocessors);
  return tiles.time < (quantised < kShort ? kOneLaunch : 1.0f) * quantised ? tiles.rows : 0;
}

}  // namespace sage
