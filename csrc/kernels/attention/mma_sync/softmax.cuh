// From a chunk's scores to its probabilities, the rows' running maxima and sums.
#pragma once

#include "kernels/attention/mma_sync/twice.cuh"
#include "kernels/attention/quad.cuh"
#include "kernels/ptx/math.cuh"

namespace sage {

// Raises a row's base to `largest`, the chunk's, if the row exceeds what the old one allows, and brings along what was computed relative to that: of
// this block's chunks those before `chunk` too. It is called where some row exceeds. The others then rise as well, by whole powers of
// two, which leave as it is what has been rounded: else each would soon have a turn of its own, and other warps wait for every one.
template <typename Config>
__device__ __forceinline__ void raise_base(const AttentionParams& p, uint32_t shared, int row, float largest, bool exceeds, int block, int chunk,
                                           State<Config>& state, Probabilities<Config>& probabilities) {
  const float rise = largest - Config::kLevel - state.base[row];
  if constexpr (Config::kTwice) {
    if (exceeds) note_rise<Config>(notes_of_lane<Config>(shared), row, rise, block, chunk);
  }
  const float to = exceeds ? largest - Config::kLevel : state.base[row] + floorf(fmaxf(rise, 0.0f));
  const float factor = to == state.base[row] ? 1.0f : ptx::ex2(state.base[row] - to);
  state.base[row] = to;
  rescale_state<Config>(p, shared, row, factor, state);
  if constexpr (Config::kGatherN > Config::kChunkN) {
#pragma unroll
    for (int group = 0; group < chunk * (Config::kChunkN / 16); ++group) rescale_packed<Config>(probabilities, row, group, factor);
  }
}

// Probabilities of the M-th 16 rows relative to their bases, and what this lane adds up of each.
template <typename Config, int M>
__device__ __forceinline__ void exponentiate(const LogScores<Config>& scores, const State<Config>& state, LogScores<Config>& x,
                                             float (&added)[2]) {
  added[0] = added[1] = 0.0f;
#pragma unroll
  for (int n = 0; n < Config::kNFragments; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[n][i] = ptx::ex2(scores[n][i] - state.base[2 * M + i / 2]);
      added[i / 2] += x[n][i];
    }
  }
}

// A chunk's probabilities of the M-th 16 rows, whatever the scores and whatever is hidden. Computes the scores anew, so that they need not
// be kept. The first pass renews bases of which some lane has added up more than kLimit.
template <typename Config, int M>
__device__ __forceinline__ void exponentiate_with_care(const AttentionParams& p, uint32_t shared, const Tile& tile,
                                                       const Queries<Config>& q, uint32_t k_lane, const KeyBlock<Config>& block,
                                                       int first_key, int chunk, const Progress& progress, State<Config>& state,
                                                       Probabilities<Config>& probabilities, bool& noted) {
  LogScores<Config> scores, x;
  float added[2];
  compute_log_scores<Config, M>(p, tile, q, k_lane + chunk * (Config::kChunkN * Config::kKRowBytes), block.hidden,
                                first_key + chunk * Config::kChunkN, block.scale, scores);
  exponentiate<Config, M>(scores, state, x, added);
  const auto exceeds = [&](int i) { return added[i] > Config::kLimit; };
  const bool raise = __any_sync(0xffffffffu, exceeds(0) || exceeds(1)) && progress.pass == Pass::kFirst;
  if (raise) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * M + i;
      float largest = -INFINITY;
#pragma unroll
      for (int n = 0; n < Config::kNFragments; ++n) largest = fmaxf(largest, fmaxf(scores[n][i * 2], scores[n][i * 2 + 1]));
      largest = max_of_quad(largest);
      raise_base<Config>(p, shared, row, largest, any_of_row(exceeds(i)), block.index, chunk, state, probabilities);
    }
    exponentiate<Config, M>(scores, state, x, added);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * M + i;
    if (progress.pass == Pass::kFirst) {
      state.sum[row] += added[i];
      if constexpr (Config::kSmooths) {
        if (block.unsmoothed) {
          const uint32_t unsmoothed = unsmoothed_sum<Config>(shared, row);
          ptx::store_shared_float(unsmoothed, ptx::load_shared_float(unsmoothed) + added[i]);
        }
      }
    }
#pragma unroll
    for (int pair = 0; pair < Config::kNFragments / 2; ++pair) {
      float four[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) four[j] = x[pair * 2 + j / 2][i * 2 + j % 2];
      if constexpr (Config::kTwice) {
        if (progress.pass == Pass::kRest) take_rest<Config>(four, progress.in_two >> row & 1);
      }
      pack<Config>(probabilities, row, chunk * (Config::kChunkN / 16) + pair, four);
    }
  }
  if constexpr (Config::kTwice) {
    if (progress.pass != Pass::kFirst) return;
    int between = 0;
    RowNotes notes = notes_of_lane<Config>(shared);  // a copy: read and written once, not for each row and bit
    if (!look_at(block.index) && !__any_sync(0xffffffffu, notes.raised != 0)) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bool small = false;
      float excess = added[i];
#pragma unroll
      for (int j = 0; j < Config::kNFragments * 2; ++j) {
        const int n = j / 2, column = i * 2 + j % 2;
        const bool sees = scores[n][column] > -INFINITY;
        small |= x[n][column] < Config::kRestBelow && sees;
        excess -= sees ? Config::kNear : 0.0f;
      }
      note_small<Config>(notes, probabilities, state, 2 * M + i, chunk, small, like_sinks<Config>(excess, state.sum[2 * M + i]), block.index,
                         between);
    }
    write_notes<Config>(shared, notes, between);
    noted = true;
  }
}

// The largest scores of the M-th 16 rows in a chunk of which nothing is to be hidden: sooner than with care. `fits`: a number, not large, of a
// scale not so coarse that kMagic times it is rounded by more than a little: no probability might be left of the row.
template <typename Config, int M>
__device__ __forceinline__ void find_largest(const Queries<Config>& q, uint32_t k_lane, const KeyBlock<Config>& block, float (&largest)[2],
                                             bool (&fits)[2]) {
  int32_t scores[1][Config::kNFragments][4];
  compute_scores<Config, M>(q, k_lane, scores);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int32_t score = 0;  // as integers they have the order of the floats whose bits they are
#pragma unroll
    for (int n = 0; n < Config::kNFragments; ++n) score = max(score, max(scores[0][n][i * 2], scores[0][n][i * 2 + 1]));
    const float scale = block.scale[2 * M + i];
    largest[i] = max_of_quad((__int_as_float(score) - Config::kMagic) * scale);
    fits[i] = !any_of_row(!(fabsf(largest[i]) <= Config::kLargestBase) || !(scale <= Config::kCoarsest));
  }
}

// The M-th 16 rows' first bases, from the first chunk.
template <typename Config, int M>
__device__ __forceinline__ void find_bases(const Queries<Config>& q, uint32_t k_lane, const KeyBlock<Config>& block, State<Config>& state) {
  float largest[2];
  bool fits[2];
  find_largest<Config, M>(q, k_lane, block, largest, fits);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (fits[i]) state.base[2 * M + i] = largest[i] - Config::kLevel;
  }
}

// Renews the bases of those of the M-th 16 rows of which some lane has noted that it has added up too much. False: not all, since some do not fit.
template <typename Config, int M>
__device__ __forceinline__ bool raise_bases(const AttentionParams& p, uint32_t shared, const Queries<Config>& q, uint32_t k_lane,
                                            const KeyBlock<Config>& block, int chunk, State<Config>& state,
                                            Probabilities<Config>& probabilities) {
  float largest[2];
  bool fits[2], done = true;
  find_largest<Config, M>(q, k_lane, block, largest, fits);
  Notes& notes = notes_of_lane<Config>(shared);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * M + i;
    const bool exceeded = any_of_row(notes.exceeded >> row & 1);
    done &= fits[i] || !exceeded;
    raise_base<Config>(p, shared, row, fits[i] ? largest[i] : -INFINITY, exceeded && fits[i], block.index, chunk, state, probabilities);
  }
  return __all_sync(0xffffffffu, done);
}

// A chunk's probabilities, where nothing is to be hidden. Else false, and nothing but bases has changed.
template <typename Config>
__device__ __forceinline__ bool exponentiate_if_simple(const AttentionParams& p, uint32_t shared, const Queries<Config>& q, uint32_t k_lane,
                                                       const KeyBlock<Config>& block, int chunk, bool waits, State<Config>& state,
                                                       Probabilities<Config>& probabilities, bool& noted) {
  const float limit = block.unsmoothed ? -1.0f : Config::kLimit;
  float added[Config::kRows];
  bool raised = false;
#pragma unroll 1
  while (true) {
    int32_t scores[Config::kMFragments][Config::kNFragments][4];
    compute_scores<Config, 0>(q, k_lane + chunk * (Config::kChunkN * Config::kKRowBytes), scores);
    bool care = false;
#pragma unroll
    for (int row = 0; row < Config::kRows; ++row) {
      const float offset = -Config::kMagic * block.scale[row] - state.base[row];
#pragma unroll
      for (int pair = 0; pair < Config::kNFragments / 2; ++pair) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float score = __int_as_float(scores[row / 2][pair * 2 + i / 2][row % 2 * 2 + i % 2]);
          x[i] = ptx::ex2(score * block.scale[row] + offset);
        }
        const float sum = (x[0] + x[1]) + (x[2] + x[3]);
        added[row] = pair == 0 ? sum : added[row] + sum;
        pack<Config>(probabilities, row, chunk * (Config::kChunkN / 16) + pair, x);
      }
      care |= !(added[row] <= limit);  // also of what is no number
    }
    if (__builtin_expect(!__any_sync(0xffffffffu, care), 1)) break;
    // Once more with other bases: only where they often are to be renewed is that worth its registers.
    if (!Config::kTwice || raised || block.unsmoothed) return false;
    if constexpr (Config::kTwice) {
      int exceeded = 0;
#pragma unroll
      for (int row = 0; row < Config::kRows; ++row) exceeded |= !(added[row] <= limit) << row;
      notes_of_lane<Config>(shared).exceeded = exceeded;
      const uint32_t k_chunk = k_lane + chunk * (Config::kChunkN * Config::kKRowBytes);
      bool done = raise_bases<Config, 0>(p, shared, q, k_chunk, block, chunk, state, probabilities);
      if constexpr (Config::kMFragments == 2) {
        __syncwarp();  // not both at a time: registers are short
        done &= raise_bases<Config, 1>(p, shared, q, k_chunk, block, chunk, state, probabilities);
      }
      if (!done) return false;
    }
    raised = true;
  }
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) state.sum[row] += added[row];
  if constexpr (Config::kTwice) {
    if (__builtin_expect(raised || noted || waits || look_at(block.index), 0)) {
      bool some_four = false;
#pragma unroll
      for (int i = 0; i < Config::kRows * Config::kNFragments / 2; ++i) {
        some_four |= all_small<Config>(packed<Config>(probabilities, i % Config::kRows, chunk * (Config::kChunkN / 16) + i / Config::kRows));
      }
      if (raised || noted || waits || __any_sync(0xffffffffu, some_four)) {
        int between = 0;
        RowNotes notes = notes_of_lane<Config>(shared);  // a copy, as above
#pragma unroll
        for (int row = 0; row < Config::kRows; ++row) {
          bool small = false;
#pragma unroll
          for (int pair = 0; pair < Config::kNFragments / 2; ++pair) {
            small |= some_small<Config>(packed<Config>(probabilities, row, chunk * (Config::kChunkN / 16) + pair));
          }
          const bool sinks = like_sinks<Config>(added[row] - Config::kChunkN / 4 * Config::kNear, state.sum[row]);
          note_small<Config>(notes, probabilities, state, row, chunk, small, sinks, block.index, between);
        }
        write_notes<Config>(shared, notes, between);
        noted = true;
      } else {
        notes_of_lane<Config>(shared).raised = notes_of_lane<Config>(shared).first = 0;  // the first bases: they left nothing small
      }
    }
  }
  return true;
}

// Probabilities of the keys gathered, keeping the running bases and sums. Almost always all chunks are simple: what is not waits behind one
// branch. False: they are not to meet V yet, but to be gone through again.
template <typename Config>
__device__ __forceinline__ bool softmax(const AttentionParams& p, uint32_t shared, const Tile& tile, const Queries<Config>& q,
                                        uint32_t k_lane, const KeyBlock<Config>& block, int first_key, Progress& progress,
                                        State<Config>& state, Probabilities<Config>& probabilities) {
  const bool never_simple = block.hidden != Hidden::kNothing || (Config::kTwice && progress.pass != Pass::kFirst);
  if constexpr (Config::kTwice) {
    if (progress.pass == Pass::kRest) lower_bases<Config>(p, shared, progress.in_two, state);
  }
  if (first_key == 0 && !never_simple) {
    find_bases<Config, 0>(q, k_lane, block, state);
    static_assert(Config::kMFragments <= 2);
    if constexpr (Config::kMFragments == 2) find_bases<Config, 1>(q, k_lane, block, state);
  }
  bool noted = Config::kTwice && progress.pass != Pass::kFirst;
#pragma unroll
  for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
    if (!never_simple && exponentiate_if_simple<Config>(p, shared, q, k_lane, block, chunk, progress.waits, state, probabilities, noted)) continue;
    exponentiate_with_care<Config, 0>(p, shared, tile, q, k_lane, block, first_key, chunk, progress, state, probabilities, noted);
    if constexpr (Config::kMFragments == 2) {
      __syncwarp();  // not both at a time, either
      exponentiate_with_care<Config, 1>(p, shared, tile, q, k_lane, block, first_key, chunk, progress, state, probabilities, noted);
    }
  }
  if constexpr (Config::kTwice) {
    static_assert(Config::kGatherN == Config::kBlockN);
    if (__builtin_expect(noted, 0)) return proceed<Config>(shared, tile, block, state, progress);
  }
  return true;
}

}  // namespace sage
