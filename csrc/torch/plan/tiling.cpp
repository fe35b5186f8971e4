#include "torch/plan/tiling.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "kernels/attention/sm90_qk_int8_pv_f16.h"
#include "kernels/sequences.h"

namespace sage {

namespace {

constexpr int32_t kWarpgroupRows = Sm90QkInt8PvF16::kRows;  // of the output, that a warpgroup computes
constexpr int32_t kFewer = 2 * kWarpgroupRows;             // that a block of threads computes with two warpgroups of three

// Of a head.
int32_t warpgroups_of(const Call& call) { return (call.shape.qo_len + kWarpgroupRows - 1) / kWarpgroupRows; }
int32_t key_blocks_of(const Call& call) { return (call.shape.kv_len + QuantKInt8::kBlockN - 1) / QuantKInt8::kBlockN; }

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

// Clusters that run at once, by when each is done with what it has: whoever is first takes what comes next.
class Clusters {
 public:
  explicit Clusters(int32_t clusters) : clusters_(clusters) { groups_[0] = {0.0f, clusters}; }

  void take(int64_t items, float time) {
    while (items > 0) {
      const auto [first, last] = std::minmax_element(groups_, groups_ + size_);
      if (items >= clusters_ && last->done - first->done <= time) {  // then nobody takes two while another one takes none
        for (int32_t i = 0; i < size_; ++i) groups_[i].done += time * static_cast<float>(items / clusters_);
        items %= clusters_;
      } else if (items >= first->clusters) {
        items -= first->clusters;
        first->done += time;
      } else {
        first->clusters -= static_cast<int32_t>(items);
        groups_[size_++] = {first->done + time, static_cast<int32_t>(items)};
        return;
      }
    }
  }

  float done() const { return std::max_element(groups_, groups_ + size_)->done; }

 private:
  struct Group {
    float done;
    int32_t clusters;
    bool operator<(const Group& other) const { return done < other.done; }
  };
  Group groups_[3 + 2 * Sm90QkInt8PvF16::kMostParts];  // one more with each kind of items that is taken
  int32_t size_ = 1;
  int32_t clusters_;
};

// The part of a tile's time that it takes with so many warpgroups of a block's: so measured where such tiles are many.
float share_of(int32_t warpgroups, int32_t head_dim) {
  constexpr float kOfThree[] = {0.0f, 0.61f, 0.78f, 1.0f}, kOfTwo[] = {0.0f, 0.6f, 1.0f};
  return head_dim <= 128 ? kOfThree[warpgroups] : kOfTwo[warpgroups];
}

// How long leaving parts of a tile and adding them up takes: as long as so many blocks of keys.
float time_of_parting(int32_t parts, int32_t head_dim) {
  const auto number = static_cast<float>(parts);
  return parts == 1 ? 0.0f : head_dim <= 128 ? 7.0f + number : 10.0f + 2.0f * number;
}

// When the last tile is computed, in units of a tile's block of keys, of tiles that see as many keys. Each head's last one may have fewer rows. As if there were one section,
// of whose last tiles alone some may be parted.
float time_of_all(const Call& call, const Tiling& tiling, int32_t at_once) {
  const AttentionShape& shape = call.shape;
  const int32_t odd = warpgroups_of(call) % (tiling.tile_rows() / kWarpgroupRows);
  const float tile = static_cast<float>(key_blocks_of(call)) + kBlocksOfTile;
  struct Alike { int64_t tiles; float time; };
  Alike late{odd == 0 ? 0 : int64_t{shape.batch} * shape.q_heads, tile * share_of((odd + tiling.cluster - 1) / tiling.cluster, call.head_dim())};
  Alike early{tiling.tiles - late.tiles, tile * share_of(tiling.block_rows / kWarpgroupRows, call.head_dim())};
  if (!tiling.first_rows_first) std::swap(early, late);
  const int64_t last = tiling.first_rows_first ? call.last_heads() : late.tiles;  // of the last section, as many as may be parted
  const int64_t parted_early = std::min(early.tiles, tiling.parted_tiles - std::min({int64_t{tiling.parted_tiles}, late.tiles, last}));
  const int64_t parted_late = tiling.parted_tiles - parted_early;
  const auto of_part = [&](float time) {
    return time / static_cast<float>(tiling.parts) + time_of_parting(tiling.parts, call.head_dim());
  };
  Clusters clusters(at_once);
  clusters.take(early.tiles - parted_early, early.time);
  clusters.take(late.tiles - parted_late, late.time);
  for (int32_t part = 0; tiling.parts > 1 && part < tiling.parts; ++part) {
    clusters.take(parted_early, of_part(early.time));
    clusters.take(parted_late, of_part(late.time));
  }
  return clusters.done();
}

// Tiles whose rows see fewer keys the sooner they come, under a causal mask.
struct CausalTiles {
  int32_t warpgroups;  // of a head: each has as many rows as a block has keys
  int32_t together;    // in a tile
  int32_t blocks;      // of keys
};

// How long the tiles of so many heads take, `at_once` of them at a time and the longest first, in blocks of keys: each tile as long as its
// warpgroups in the mean, and as `tile` blocks beside. The last tile ends `late` longest tiles after the mean, but `latest` blocks at most.
float causal_rounds(const CausalTiles& tiles, int64_t heads, int32_t at_once, float tile, float late,
                    float latest = std::numeric_limits<float>::infinity()) {
  const int64_t fewer = std::min(tiles.warpgroups, tiles.blocks);  // that see fewer keys than there are
  const int64_t seen = fewer * (fewer + 1) / 2 + (tiles.warpgroups - fewer) * tiles.blocks;
  const int64_t tiles_of_head = (tiles.warpgroups + tiles.together - 1) / tiles.together;
  const float longest = static_cast<float>(fewer) + tile;
  if (heads * tiles_of_head <= at_once) return longest;
  const float of_head = static_cast<float>(seen) / static_cast<float>(tiles.together) + tile * static_cast<float>(tiles_of_head);
  return std::max(longest, of_head * static_cast<float>(heads) / static_cast<float>(at_once) + std::min(late * longest, latest));
}

// time_of_all under a causal mask.
float time_of_causal(const Call& call, const Tiling& tiling, int32_t at_once) {
  const CausalTiles tiles{warpgroups_of(call), tiling.tile_rows() / kWarpgroupRows, key_blocks_of(call)};
  const int64_t heads = int64_t{call.shape.batch} * call.shape.q_heads;
  // Of two for each that run at once a short one follows a long one.
  return tiling.tiles <= 2 * at_once ? causal_rounds(tiles, heads, at_once, kBlocksOfTile, 0.6f, 9.0f)
                                     : causal_rounds(tiles, heads, at_once, kBlocksOfTile, 0.45f);
}

// The same where a mask adds numbers: of whole rounds, of which a tile of few rows is half of one.
float time_of_rounds(const Call& call, const Tiling& tiling, int32_t at_once) {
  const AttentionShape& shape = call.shape;
  const int32_t rows = tiling.tile_rows();
  const bool last_are_short = shape.qo_len > rows && (shape.qo_len - 1) % rows < rows / 2;
  const int64_t whole_tiles = tiling.tiles - (last_are_short ? int64_t{shape.batch} * shape.q_heads : 0) / 2;
  return static_cast<float>((whole_tiles + at_once - 1) / at_once) * (static_cast<float>(key_blocks_of(call)) + kBlocksOfTile);
}

// Shares items out among clusters that run all at once.
Tiling shared_out(Tiling tiling, int32_t at_once, int32_t parted_tiles = 0, int32_t parts = 1) {
  tiling.parted_tiles = parted_tiles;
  tiling.parts = parts;
  tiling.items = tiling.tiles + parted_tiles * (parts - 1);
  tiling.blocks = static_cast<uint32_t>(std::min(tiling.items, at_once) * tiling.cluster);
  return tiling;
}

// Of tiles that see as many keys, those that are computed first. Of a last round, which some of the clusters have and the others would wait for, they may be parted.
Tiling fastest_of_alike(const Call& call, int32_t multiprocessors) {
  constexpr float kAlone = 1.01f, kFirstRowsFirst = 1.01f;  // beside pairs, and last rows first, which save power
  constexpr int32_t kFewRounds = 16;
  const bool one_section = call.last_heads() == call.all_heads();
  const int32_t most = call.kernel.block_m(call.head_dim());
  Tiling best;
  const auto look_at = [&](int32_t block_rows, int32_t cluster) {
    const Tiling tiling = tiling_with(call, block_rows, cluster);
    const int32_t at_once = multiprocessors / cluster, last_round = tiling.tiles % at_once;
    // First rows first, so that short tiles fill the end, where there are several sections and few rounds. Of one section either may end first.
    const bool few_rounds = tiling.tiles < kFewRounds * at_once;
    const int32_t most_parts = last_round > 0 ? std::min(at_once / last_round, Sm90QkInt8PvF16::kMostParts) : 1;
    for (int32_t parts = 1; parts <= most_parts; ++parts) {
      Tiling one = shared_out(tiling, at_once, parts > 1 ? last_round : 0, parts);
      for (const bool first_rows_first : {false, true}) {
        if (!one_section && first_rows_first != few_rounds) continue;
        one.first_rows_first = first_rows_first;
        one.time = time_of_all(call, one, at_once) * (cluster == 1 ? kAlone : 1.0f) * (one_section && first_rows_first ? kFirstRowsFirst : 1.0f);
        if (best.tiles == 0 || one.time < best.time) best = one;
      }
    }
  };
  if (call.shape.qo_len > most && multiprocessors > 1) look_at(most, 2);
  look_at(most, 1);
  if (most > kFewer) look_at(kFewer, 1);
  return best;
}

}  // namespace

Tiling tiling_of(const Call& call, int32_t multiprocessors, MaskForm mask) {
  const int32_t most = call.kernel.block_m(call.head_dim());
  if (!call.kernel.wgmma_int8) return tiling_with(call, most, 1);
  const bool hides = mask == MaskForm::kBoolOfKeys || mask == MaskForm::kBool;  // numbers hide little, as a rule
  const bool known = !hides && !call.packed();                                   // how long a tile takes
  const bool causal = call.options.is_causal;
  if (mask == MaskForm::kNone && !causal && !call.packed()) {
    // A call asks twice, and a model for the same sizes again and again; this takes two microseconds.
    const AttentionShape& shape = call.shape;
    const std::array<int64_t, 6> sizes{int64_t{shape.batch} * shape.q_heads, int64_t{shape.batch} * shape.kv_heads, shape.qo_len, shape.kv_len,
                                       call.head_dim(), multiprocessors};
    thread_local std::array<int64_t, 6> last_sizes{};
    thread_local Tiling last;
    if (sizes != last_sizes) {
      last = fastest_of_alike(call, multiprocessors);
      last_sizes = sizes;
    }
    return last;
  }
  // A pair of blocks, unless too much of its time one would have no rows or wait for keys that only the other's see.
  const int32_t row_blocks = (call.shape.qo_len + most - 1) / most;
  constexpr int64_t kLong = 768;  // of packed sequences, in the mean; two heads share a pair where one ends
  const bool pairs = call.packed() ? !causal && call.shape.q_heads % 2 == 0 && call.shape.qo_len >= kLong * call.shape.batch
                     : causal      ? row_blocks >= 20
                                   : row_blocks % 2 == 0 || row_blocks >= 16;
  const int32_t cluster = multiprocessors > 1 && pairs && mask != MaskForm::kBool ? 2 : 1, at_once = multiprocessors / cluster;
  Tiling tiling = shared_out(tiling_with(call, most, cluster), at_once);
  const auto time = [&](const Tiling& one, int32_t clusters) {
    return !known ? 0.0f : causal ? time_of_causal(call, one, clusters) : time_of_rounds(call, one, clusters);
  };
  tiling.time = time(tiling, at_once);
  if (most <= kFewer || call.packed()) return tiling;
  // Two warpgroups of three take three quarters of the time for two thirds of the rows: less, where such tiles need few rounds.
  Tiling fewer = shared_out(tiling_with(call, kFewer, 1), multiprocessors);
  fewer.time = (call.head_dim() <= 64 ? 0.80f : 0.77f) * time(fewer, multiprocessors);  // as share_of has it, with a margin
  return (known ? fewer.time < tiling.time : fewer.tiles <= multiprocessors) ? fewer : tiling;
}

}  // namespace sage
