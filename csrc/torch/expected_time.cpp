#include "torch/expected_time.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "torch/hopper_in_16_bits.h"
#include "torch/tiling.h"

namespace sage {

namespace {

enum Kind { kNone, kCausal, kBias };  // of mask

// Microseconds on an H200 under load, fitted to the shapes of bench/results/h200-short.json, to 32 long ones, and to 144 with a bias (bench/notes.md).
struct Costs {
  int32_t head_dim;  // up to which
  struct {
    float start, block[3];  // of any call; of 128 keys of a tile of 128 rows
    float tile;             // as many such blocks
    float uneven;           // times as long, where nothing but the last block of keys is hidden, in part
  } cudnn;
  struct {
    float start, k, block[3];  // of any call; of 1000 tokens of a head of K, quantised; of a unit of Tiling::time
  } ours;
};
constexpr Costs kCosts[] = {
    {64, {4.36f, {1.131f, 1.146f, 2.12f}, 0.9f, 1.10f}, {5.16f, 0.036f, {0.646f, 0.625f, 1.42f}}},
    {128, {4.00f, {1.677f, 1.739f, 3.24f}, 0.9f, 1.08f}, {4.85f, 0.079f, {0.873f, 0.831f, 1.75f}}},
    {192, {2.75f, {2.432f, 2.264f}, 1.5f, 1.0f}, {5.35f, 0.272f, {0.967f, 0.920f}}},
    {256, {1.92f, {3.145f, 2.865f}, 1.7f, 1.0f}, {4.34f, 0.383f, {1.056f, 0.997f}}},
};
// Of a block, that each of the first few of a call takes less by cuDNN.
constexpr float kQuick = 0.1f;
constexpr int32_t kQuickBlocks = 12;
// With a bias: of the kernel that looks at it, any, and a million of its elements; of the one that looks at what cuDNN made of rows that see nothing.
constexpr float kLook = 3.3f, kLookAtElements = 0.6f, kLookAtRows = 2.0f;
// What does not quantise is taken where it is so much slower, too: it is more exact. PyTorch's only where it is so much faster than ours in 16 bits, which
// takes less of the host and makes no plans.
constexpr float kPreference = 1.01f, kReluctance = 0.92f;
// Of calls that take less microseconds, the kernel in 16 bits is taken where it is so much slower than the one that quantises: it is one launch.
constexpr float kShort = 40.0f, kOneLaunch = 1.05f;

float cudnn_time(const AttentionShape& shape, Kind kind, int32_t multiprocessors, const Costs& costs) {
  constexpr int32_t kTile = 128;
  const int32_t blocks = (shape.kv_len + kTile - 1) / kTile;
  const int64_t heads = int64_t{shape.batch} * shape.q_heads;
  const int32_t tiles = (shape.qo_len + kTile - 1) / kTile;
  const float rounds = kind == kCausal ? causal_rounds({tiles, 1, blocks}, heads, multiprocessors, costs.cudnn.tile, 0.61f)
                                       : static_cast<float>((tiles * heads + multiprocessors - 1) / multiprocessors) *
                                                 (static_cast<float>(blocks) + costs.cudnn.tile) -
                                             kQuick * static_cast<float>(std::min(blocks, kQuickBlocks));
  const bool uneven = kind == kNone && shape.kv_len % kTile != 0;
  return costs.cudnn.start + costs.cudnn.block[kind] * rounds * (uneven ? costs.cudnn.uneven : 1.0f) + (kind == kBias ? kLookAtRows : 0.0f);
}

float our_time(const Call& call, Kind kind, int64_t bias, int32_t multiprocessors, const Costs& costs) {
  const auto tokens = static_cast<float>(int64_t{call.shape.batch} * call.shape.kv_heads * call.shape.kv_len);
  const float look = kind == kBias ? kLook + kLookAtElements * static_cast<float>(bias) / 1e6f : 0.0f;
  const MaskKind mask = kind == kBias ? MaskKind::kAdded : MaskKind::kNone;
  return costs.ours.start + costs.ours.k * tokens / 1000.0f + look + costs.ours.block[kind] * tiling_of(call, multiprocessors, mask).time;
}

}  // namespace

Fastest fastest(const Call& call, int32_t multiprocessors, int64_t bias, bool in_16_bits, bool by_pytorch) {
  if (!call.kernel.persistent) return {Way::kQuantised};
  const AttentionShape& shape = call.shape;
  const Kind kind = bias > 0 ? kBias : call.options.is_causal ? kCausal : kNone;
  if (kind == kBias && (call.options.is_causal || shape.head_dim > 128)) return {Way::kQuantised};  // not measured
  // Of sizes that it has not seen cuDNN first makes a plan, which takes 30 ms. Few queries are a model's that writes, each time over some keys more;
  // under a causal mask most are of prompts, which have any length, and with a bias of texts.
  constexpr int32_t kFewQueries = 16, kUsual = 64;
  if (shape.qo_len <= kFewQueries || (kind != kNone && (shape.qo_len % kUsual != 0 || shape.kv_len % kUsual != 0))) by_pytorch = false;
  in_16_bits = in_16_bits && kind != kBias;
  if (!in_16_bits && !by_pytorch) return {Way::kQuantised};
  // With few keys memory is the limit, and quantising them something on top. 129 to 192 are as many to cuDNN as 256.
  const int32_t few_keys = shape.head_dim <= 128 ? 128 : 512, keys = shape.kv_len;
  const bool few = keys <= few_keys || (keys > 192 && keys <= 256);
  if (few && !in_16_bits) return {Way::kPytorch};
  const TilesIn16Bits tiles = in_16_bits ? tiles_in_16_bits(shape, call.options.is_causal, multiprocessors) : TilesIn16Bits{0, std::numeric_limits<float>::infinity()};
  const Fastest unquantised{Way::kIn16Bits, tiles.rows};
  if (few) return unquantised;
  const Costs& costs = *std::find_if(std::begin(kCosts), std::end(kCosts) - 1,
                                     [&](const Costs& some) { return shape.head_dim <= some.head_dim; });
  const float quantised = our_time(call, kind, bias, multiprocessors, costs);
  if (by_pytorch && cudnn_time(shape, kind, multiprocessors, costs) < std::min(kPreference * quantised, kReluctance * tiles.time)) return {Way::kPytorch};
  return tiles.time < (quantised < kShort ? kOneLaunch : 1.0f) * quantised ? unquantised : Fastest{Way::kQuantised};
}

}  // namespace sage
