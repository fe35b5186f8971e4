#include "torch/expected_time.h"

#include <algorithm>
#include <iterator>

#include "torch/tiling.h"

namespace sage {

namespace {

enum Kind { kNone, kCausal, kBias };  // of mask

// Microseconds on an H200 under load, fitted to the shapes of bench/results/h200-short.json, and to 144 with a bias (bench/notes.md).
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
    {64, {3.84f, {1.089f, 1.132f, 2.04f}, 0.94f, 1.12f}, {5.74f, 0.062f, {0.626f, 0.604f, 1.39f}}},
    {128, {3.76f, {1.527f, 1.688f, 3.12f}, 1.02f, 1.08f}, {6.02f, 0.110f, {0.832f, 0.799f, 1.71f}}},
    {192, {2.46f, {2.226f, 2.215f}, 1.53f, 1.0f}, {6.71f, 0.502f, {0.922f, 0.811f}}},
    {256, {1.87f, {2.878f, 2.870f}, 1.46f, 1.0f}, {6.38f, 0.617f, {0.955f, 0.824f}}},
};
// With a bias: of the kernel that looks at it, any, and a million of its elements; of the one that looks at what cuDNN made of rows that see nothing.
constexpr float kLook = 3.3f, kLookAtElements = 0.6f, kLookAtRows = 2.0f;
// PyTorch's is taken where it is so much slower, too: it is more exact.
constexpr float kPreference = 1.02f;

float cudnn_time(const AttentionShape& shape, Kind kind, int32_t multiprocessors, const Costs& costs) {
  constexpr int32_t kTile = 128;
  const int32_t blocks = (shape.kv_len + kTile - 1) / kTile;
  const int64_t heads = int64_t{shape.batch} * shape.q_heads;
  const int32_t tiles = (shape.qo_len + kTile - 1) / kTile;
  const float rounds = kind == kCausal ? causal_rounds({tiles, 1, blocks}, heads, multiprocessors, costs.cudnn.tile, 0.61f)
                                       : static_cast<float>((tiles * heads + multiprocessors - 1) / multiprocessors) *
                                             (static_cast<float>(blocks) + costs.cudnn.tile);
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

bool pytorch_is_faster(const Call& call, int32_t multiprocessors, int64_t bias) {
  if (!call.kernel.persistent) return false;
  const Kind kind = bias > 0 ? kBias : call.options.is_causal ? kCausal : kNone;
  if (kind == kBias && (call.options.is_causal || call.shape.head_dim > 128)) return false;  // not measured
  // Of sizes that it has not seen cuDNN first makes a plan, which takes 30 ms. Few queries are a model's that writes, each time over some keys more;
  // under a causal mask most are of prompts, which have any length, and with a bias of texts.
  constexpr int32_t kFewQueries = 16, kUsual = 64;
  if (call.shape.qo_len <= kFewQueries) return false;
  if (kind != kNone && (call.shape.qo_len % kUsual != 0 || call.shape.kv_len % kUsual != 0)) return false;
  // With few keys memory is the limit, and quantising them something on top. 129 to 192 are as many to cuDNN as 256.
  const int32_t few_keys = call.shape.head_dim <= 128 ? 128 : 512, keys = call.shape.kv_len;
  if (keys <= few_keys || (keys > 192 && keys <= 256)) return true;
  const Costs& costs = *std::find_if(std::begin(kCosts), std::end(kCosts) - 1,
                                     [&](const Costs& some) { return call.shape.head_dim <= some.head_dim; });
  return cudnn_time(call.shape, kind, multiprocessors, costs) < kPreference * our_time(call, kind, bias, multiprocessors, costs);
}

}  // namespace sage
