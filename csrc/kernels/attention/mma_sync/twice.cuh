// Taking rows in two, in e4m3: where one key outweighs the others of its block so far that these are rounded to little or nothing, another
// pass over the block adds what rounding left. Which rows, and how (config.cuh says why).
#pragma once

#include "kernels/attention/mma_sync/state.cuh"
#include "kernels/attention/quad.cuh"

namespace sage {

// How a block of keys is gone through: kFirst; where rows are to be taken in two kFirst, kRest; where a base of theirs rose within the block kFirst,
// whose probabilities meet no V, kAgain, kRest. Nearly all are done with the first.
enum class Pass {
  kFirst,
  kAgain,  // a row is to be taken in two, but its base rose between two chunks: once more, so that nothing has been rounded twice
  kRest,   // what rounding has left of those rows' small probabilities
};

// Where a warp is in that.
struct Progress {
  Pass pass = Pass::kFirst;
  bool waits = false;   // whether of some row it is not told yet what its new base leaves small
  uint32_t in_two = 0;  // a bit for each of a lane's rows
};

// What a lane keeps in shared memory of its rows, since registers are short and this is seldom asked for: a bit for each.
struct RowNotes {
  // Of a chunk, for raise_bases: rows of which this lane has added up too much.
  uint8_t exceeded = 0;
  // By note_rise, for note_small, until a chunk tells what the new base leaves small: rows whose base has been raised; from nothing; by kJump or more.
  uint8_t raised = 0, first = 0, leapt = 0;
  uint8_t rescaled = 0;  // By note_rise, for proceed: whether a base rose within the block.
  // Of a block, for rows_in_two. By note_small: rows whose first base or whose leap left small probabilities; of which only few are not small.
  uint8_t jumped = 0, few = 0;
  uint8_t returned = 0;  // By note_rise: rows whose base, which had been lowered, rose again.
};
struct Notes : RowNotes {
  int between = 0;        // by note_small: of rows that jumped or left few, what count_between counts of this lane's keys of the block
  int16_t in_vain = 0;    // blocks that were taken in two needlessly, or for few of the warp's rows
  uint16_t last = 60000;  // block that was taken in two last, its last 16 bits

  // All rows are about to have their first bases.
  static __device__ __forceinline__ Notes at_start(int rows) {
    Notes notes;
    notes.raised = notes.first = (1 << rows) - 1;
    return notes;
  }
};

template <typename Config>
__device__ __forceinline__ Notes& notes_of_lane(uint32_t shared) {
  static_assert(sizeof(Notes) * Config::kThreads == Config::kNotesBytes);
  return static_cast<Notes*>(__cvta_shared_to_generic(shared + Config::kNotesOffset))[threadIdx.x];
}

// Writes back a copy of what is kept of rows, and adds to the count.
template <typename Config>
__device__ __forceinline__ void write_notes(uint32_t shared, const RowNotes& rows, int between) {
  Notes& notes = notes_of_lane<Config>(shared);
  static_cast<RowNotes&>(notes) = rows;
  notes.between += between;
}

// Whether a block comes so soon after one that was taken in two that it shows whether that was worth it.
template <typename Config>
__device__ __forceinline__ bool recent(const Notes& notes, int block) {
  return static_cast<uint16_t>(block - notes.last) <= Config::kRecent;
}

// Blocks in which small probabilities are looked for though no base has been raised.
__device__ __forceinline__ bool look_at(int block) { return (block & (block - 1)) == 0; }

// Notes that a row's base has risen.
template <typename Config>
__device__ __forceinline__ void note_rise(Notes& notes, int row, float rise, int block, int chunk) {
  const bool first = rise > -0.5f * Config::kNever;
  if (chunk > 0) notes.rescaled = 1;
  notes.raised |= 1 << row;
  if (first) notes.first |= 1 << row;
  if (!first && rise >= Config::kJump + (recent<Config>(notes, block) ? Config::kRest : 0.0f)) notes.leapt |= 1 << row;
  if (!first && recent<Config>(notes, block)) notes.returned |= 1 << row;
}

// Whether four keys that a lane has of a row are so small that e4m3 has less than its three bits of them: all, or some.
template <typename Config>
__device__ __forceinline__ bool all_small(uint32_t four) {
  static_assert(Config::kRestBelow == 0x1p-6f);  // the least number of e4m3 that is not subnormal
  return (four & 0x78787878u) == 0;
}
template <typename Config>
__device__ __forceinline__ bool some_small(uint32_t four) {
  return (~((four & 0x78787878u) + 0x78787878u) & 0x80808080u) != 0;
}

// How many of four keys are neither small nor near the row's largest, which is 1 or more; and, times 2^16, how many are small, but more than nothing.
__device__ __forceinline__ int count_between(uint32_t four) {
  const auto count = [](uint32_t bytes) { return __popc(bytes & 0x80808080u); };
  const int normal = count((four & 0x78787878u) + 0x78787878u);
  return normal - count(four + 0x48484848u) + ((count(four + 0x7f7f7f7fu) - normal) << 16);
}

// Whether what a lane sees of a row in a chunk may all be sinks: `excess` is what it adds up, less kNear for each key that it sees.
template <typename Config>
__device__ __forceinline__ bool like_sinks(float excess, float sum) {
  return excess >= -Config::kFewKeys * Config::kNear && sum < Config::kSettled;
}

// Notes what a chunk's probabilities tell of a row. `some`: whether this lane has small ones of it; `sinks`: whether it is like_sinks.
template <typename Config>
__device__ __forceinline__ void note_small(RowNotes& notes, Probabilities<Config>& probabilities, const State<Config>& state, int row, int chunk,
                                           bool some, bool sinks, int block, int& between) {
  int fours = 0, between_of_row = 0;
#pragma unroll
  for (int pair = 0; pair < Config::kNFragments / 2; ++pair) {
    const uint32_t four = packed<Config>(probabilities, row, chunk * (Config::kChunkN / 16) + pair);
    fours += all_small<Config>(four);
    between_of_row += count_between(four);
  }
  fours = sum_of_quad(fours);
  // No branches: with them the compiler takes the lanes for divergent from here on.
  const int any = any_of_row(some), raised = notes.raised >> row & 1, first = notes.first >> row & 1, leapt = notes.leapt >> row & 1;
  const int jumped = any & (leapt | (first & (fours > 0))), few = any & (raised | look_at(block)) & (fours >= Config::kNFragments);
  notes.jumped |= jumped << row;
  notes.few |= few << row;
  between += between_of_row * (jumped | few);
  const int waits = !any_of_row(some || !sinks) & (state.base[row] != Config::kNever);  // the next chunk is asked
  const int kept = ~(1 << row) | waits << row;
  notes.raised &= kept;
  notes.first &= kept;
  notes.leapt &= kept;
}

// Of how many of the warp's rows a bit is set.
template <typename Config>
__device__ __forceinline__ int count_rows(uint32_t bits) {
  int count = 0;
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) count += __popc(__ballot_sync(0xffffffffu, bits >> row & 1)) / 4;
  return count;
}

// Which rows are to be taken in two. Keeps account of what came of it.
template <typename Config>
__device__ __forceinline__ uint32_t rows_in_two(const Tile& tile, const KeyBlock<Config>& block, const State<Config>& state, Notes& notes) {
  if (!__any_sync(0xffffffffu, (notes.jumped | notes.few | notes.returned) != 0)) return 0;
  const int rows = min(tile.qo_len - tile.first_row - static_cast<int>(threadIdx.x) / 32 * Config::kWarpM, Config::kWarpM);
  const auto many = [&](uint32_t bits) { return count_rows<Config>(bits) * Config::kQuorum >= rows; };
  const int candidates = count_rows<Config>(notes.jumped | notes.few);
  const int counts = __reduce_add_sync(0xffffffffu, notes.between), between = counts & 0xffff, small = counts >> 16;
  const bool no_gap = Config::kQuorum * between >= candidates && small <= Config::kTail * between;
  const bool far_apart = no_gap && between >= Config::kBetween * candidates && small >= between;
  notes.in_vain += many(notes.returned) && no_gap;
  const bool together = candidates * Config::kQuorum >= rows, credit = notes.in_vain < Config::kInVain + block.index / Config::kPardon;
  uint32_t in_two = far_apart ? 0 : (together || credit ? notes.jumped : 0) | (together && credit ? notes.few : 0);
  notes.jumped = notes.few = notes.returned = 0;
  notes.between = 0;
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
    const bool never = state.sum[row] > Config::kEnough || fabsf(state.base[row]) > Config::kLargestBase;
    in_two &= ~(static_cast<uint32_t>(any_of_row(never)) << row);
  }
  // Another pass computes with care what the rows' sums may have without: where scores are coarse, powers of two apart.
  if (__any_sync(0xffffffffu, coarsest<Config>(block) > Config::kCoarsest)) in_two = 0;
  if (__any_sync(0xffffffffu, in_two != 0)) {
    notes.in_vain += !together;
    notes.last = block.index;
  }
  return in_two;
}

// Where to go on after a pass that noted something, or after the others. False: the block is not to meet V yet.
template <typename Config>
__device__ __forceinline__ bool proceed(uint32_t shared, const Tile& tile, const KeyBlock<Config>& block, const State<Config>& state,
                                        Progress& progress) {
  Notes& notes = notes_of_lane<Config>(shared);
  bool rescaled;
  switch (progress.pass) {
    case Pass::kFirst:
      progress.in_two = rows_in_two<Config>(tile, block, state, notes);
      progress.waits = __any_sync(0xffffffffu, (notes.raised | notes.first | notes.leapt) != 0);
      rescaled = notes.rescaled;
      notes.rescaled = 0;
      if (!__any_sync(0xffffffffu, progress.in_two != 0)) break;
      progress.pass = __any_sync(0xffffffffu, rescaled) ? Pass::kAgain : Pass::kRest;
      return progress.pass == Pass::kRest;
    case Pass::kAgain:
      progress.pass = Pass::kRest;
      break;
    case Pass::kRest:
      progress.pass = Pass::kFirst;
      break;
  }
  return true;
}

// Lowers the bases of the rows that are taken in two.
template <typename Config>
__device__ __forceinline__ void lower_bases(const AttentionParams& p, uint32_t shared, uint32_t in_two, State<Config>& state) {
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
    const bool lower = in_two >> row & 1;
    if (lower) state.base[row] -= Config::kRest;
    rescale_state<Config>(p, shared, row, lower ? static_cast<float>(1 << static_cast<int>(Config::kRest)) : 1.0f, state);
  }
}

// What rounding to e4m3 left of probabilities below kRestBelow. They are given 2^kRest times larger; of other rows there is no rest.
template <typename Config>
__device__ __forceinline__ void take_rest(float (&x)[4], bool in_two) {
  constexpr float kFactor = static_cast<float>(1 << static_cast<int>(Config::kRest));
  float rounded[4];
  unpack_e4m3(rounded, ptx::pack_e4m3x4(x[0] / kFactor, x[1] / kFactor, x[2] / kFactor, x[3] / kFactor));
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = in_two && x[i] < Config::kRestBelow * kFactor ? x[i] - rounded[i] * kFactor : 0.0f;
}

}  // namespace sage
