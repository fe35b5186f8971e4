// From a chunk's scores to its probabilities, the rows' running maxima and sums.
#pragma once

#include "kernels/attention/mma_sync/scores.cuh"
#include "kernels/attention/quad.cuh"
#include "kernels/element.cuh"
#include "kernels/ptx/cp_async.cuh"
#include "kernels/ptx/float8.cuh"
#include "kernels/ptx/math.cuh"

namespace sage {

template <typename Config>
using Probabilities = uint32_t[Config::kMFragments][Config::kPvSteps][4];  // A fragments

// What a lane keeps of its rows.
template <typename Config>
struct State {
  float out[Config::kMFragments][Config::kOFragments][4];
  // In log2 units: what probabilities are relative to. The row's largest score less kLevel when it was last renewed.
  float base[Config::kRows];
  float sum[Config::kRows];  // this lane's columns only
};

// What is the same for all chunks of a block of keys.
template <typename Config>
struct KeyBlock {
  float scale[Config::kRows];  // of scores
  Hidden hidden;
  bool unsmoothed;  // V, though others are smoothed
  // Where to look for keys that one outweighs: among the first 16, or among all.
  bool look;
  bool look_in_all;
};

// Of the scales of a lane's rows the largest.
template <typename Config>
__device__ __forceinline__ float coarsest(const KeyBlock<Config>& block) {
  float largest = block.scale[0];
#pragma unroll
  for (int row = 1; row < Config::kRows; ++row) largest = fmaxf(largest, block.scale[row]);
  return largest;
}

// Where this lane keeps how much of a row's sum fell on blocks whose V was not smoothed: the others' share of the mean is due in the end.
template <typename Config>
__device__ __forceinline__ uint32_t unsmoothed_sum(uint32_t shared, int row) {
  return shared + Config::kUnsmoothedOffset + (row * Config::kThreads + threadIdx.x) * 4;
}

// Multiplies what has been added up relative to a row's base, which falls by log2(factor).
template <typename Config>
__device__ __forceinline__ void rescale_state(const AttentionParams& p, uint32_t shared, int row, float factor, State<Config>& state) {
  state.sum[row] *= factor;
#pragma unroll
  for (int d = 0; d < Config::kOFragments; ++d) {
    state.out[row / 2][d][row % 2 * 2] *= factor;
    state.out[row / 2][d][row % 2 * 2 + 1] *= factor;
  }
  if constexpr (Config::kUnsmoothedBytes > 0) {
    if (p.v_mean != nullptr) {
      const uint32_t unsmoothed = unsmoothed_sum<Config>(shared, row);
      ptx::store_shared_float(unsmoothed, ptx::load_shared_float(unsmoothed) * factor);
    }
  }
}

// Where they have those of a row and 16 keys, the group-th of those gathered: in 8 bits all four of a lane.
template <typename Config>
__device__ __forceinline__ auto& packed(Probabilities<Config>& probabilities, int row, int group) {
  static_assert(Config::kValues == Values::kE4m3);
  return probabilities[row / 2][group / 2][row % 2 + group % 2 * 2];
}

// Probabilities of a row and 16 keys.
template <typename Config>
__device__ __forceinline__ void pack(Probabilities<Config>& probabilities, int row, int group, const float (&x)[4]) {
  // The C fragments of two groups of 8 keys are the A fragment of a 16-key step. In 8 bits those of four are that of a 32-key step,
  // if in each 16 keys V's are taken in the order 0 1 8 9, 2 3 10 11, ...
  if constexpr (Config::kValues != Values::kE4m3) {
    probabilities[row / 2][group][row % 2] = Pair<typename Config::ProbabilityType>::pack(x[0], x[1]);
    probabilities[row / 2][group][row % 2 + 2] = Pair<typename Config::ProbabilityType>::pack(x[2], x[3]);
  } else {
    packed<Config>(probabilities, row, group) = ptx::pack_e4m3x4(x[0], x[1], x[2], x[3]);
  }
}

__device__ __forceinline__ void unpack_e4m3(float (&x)[4], uint32_t bits) {
  uint32_t pairs[2];
  ptx::unpack_e4m3x4(pairs[0], pairs[1], bits);
  unpack<__half>(x, pairs);
}

// Multiplies what pack() packed: where the row's base has grown since.
template <typename Config>
__device__ __forceinline__ void rescale_packed(Probabilities<Config>& probabilities, int row, int group, float factor) {
  if constexpr (Config::kValues == Values::kF16) {
    const __half2 factors = __float2half2_rn(factor);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      auto& pair = reinterpret_cast<__half2&>(probabilities[row / 2][group][row % 2 + i * 2]);
      pair = __hmul2(pair, factors);
    }
  } else {
    uint32_t& bits = packed<Config>(probabilities, row, group);
    float x[4];
    unpack_e4m3(x, bits);
    bits = ptx::pack_e4m3x4(x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor);
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

// Raises a row's base, if some lane has added up more than kLimit, to its largest score of this chunk, and brings along what was
// computed relative to the old one. By how much.
template <typename Config>
__device__ __forceinline__ float raise_base(const AttentionParams& p, uint32_t shared, const LogScores<Config>& scores, int row, int chunk,
                                            bool exceeded, State<Config>& state, Probabilities<Config>& probabilities) {
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < Config::kNFragments * 2; ++i) largest = fmaxf(largest, scores[i / 2][row % 2 * 2 + i % 2]);
  largest = max_of_quad(largest);
  const bool raise = any_of_row(exceeded);
  const float rise = raise ? largest - Config::kLevel - state.base[row] : 0.0f;
  const float factor = ptx::ex2(-rise);
  if (raise) state.base[row] = largest - Config::kLevel;
  rescale_state<Config>(p, shared, row, factor, state);
  if constexpr (Config::kGatherN > Config::kChunkN) {
#pragma unroll
    for (int group = 0; group < chunk * (Config::kChunkN / 16); ++group) rescale_packed<Config>(probabilities, row, group, factor);
  }
  return rise;
}

// How a block of keys is gone through. Nearly all are done with the first.
enum class Pass {
  kFirst,
  kAgain,  // a row is to be taken in two: once more, now that its base is known, so that nothing has been rounded twice
  kRest,   // what rounding has left of those rows' small probabilities
};

// Where a warp is in that. `in_two` has a bit for each of a lane's rows that is taken in two.
struct Progress {
  Pass pass = Pass::kFirst;
  uint32_t in_two = 0;
};

// Whether four keys that a lane has of a row are so small that e4m3 has less than its three bits of them.
template <typename Config>
__device__ __forceinline__ bool all_small(uint32_t four) {
  static_assert(Config::kRestBelow == 0x1p-6f);  // the least number of e4m3 that is not subnormal
  return (four & 0x78787878u) == 0;
}

// A chunk's probabilities of the M-th 16 rows. Computes the scores anew, so that they need not be kept. The first pass finds rows to be
// taken in two.
template <typename Config, int M>
__device__ __forceinline__ void exponentiate_with_care(const AttentionParams& p, uint32_t shared, const Tile& tile,
                                                       const Queries<Config>& q, uint32_t k_lane, const KeyBlock<Config>& block,
                                                       int first_key, int chunk, Progress& progress, State<Config>& state,
                                                       Probabilities<Config>& probabilities) {
  LogScores<Config> scores, x;
  float added[2];
  compute_log_scores<Config, M>(p, tile, q, k_lane + chunk * (Config::kChunkN * Config::kKRowBytes), block.hidden,
                                first_key + chunk * Config::kChunkN, block.scale, scores);
  exponentiate<Config, M>(scores, state, x, added);
  float rise[2] = {};
  const auto exceeds = [&](int i) { return added[i] > Config::kLimit; };
  const bool raise = __any_sync(0xffffffffu, exceeds(0) || exceeds(1)) && progress.pass == Pass::kFirst;
  if (raise) {
#pragma unroll
    for (int i = 0; i < 2; ++i) rise[i] = raise_base<Config>(p, shared, scores, 2 * M + i, chunk, exceeds(i), state, probabilities);
    exponentiate<Config, M>(scores, state, x, added);
  }
  const bool look = progress.pass == Pass::kFirst && (chunk == 0 ? block.look : block.look_in_all);
  if (Config::kTwice && (raise || look)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * M + i;
      bool small = false, all_small = false;
#pragma unroll
      for (int pair = 0; pair < Config::kNFragments / 2; ++pair) {
        float four = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int n = pair * 2 + j / 2, column = i * 2 + j % 2;
          small |= x[n][column] < Config::kRestBelow && scores[n][column] > -INFINITY;
          four += x[n][column];
        }
        all_small |= four < 4 * Config::kRestBelow;
      }
      const bool some = any_of_row(small), few = any_of_row(all_small) && (look || rise[i] > 0.0f);
      const bool never = any_of_row(state.sum[row] > Config::kEnough || fabsf(state.base[row]) > Config::kLargestBase);
      // A row's first base is no jump.
      if (some && !never && (few || (rise[i] >= Config::kJump && rise[i] < -0.5f * Config::kNever))) progress.in_two |= 1u << row;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * M + i;
    if (progress.pass == Pass::kFirst) {
      state.sum[row] += added[i];
      if constexpr (Config::kUnsmoothedBytes > 0) {
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
}

// A chunk's probabilities, where nothing is to be hidden and no base need be raised. Else false, and nothing has changed.
template <typename Config>
__device__ __forceinline__ bool exponentiate_if_simple(const Queries<Config>& q, uint32_t k_lane, const KeyBlock<Config>& block, int chunk,
                                                       State<Config>& state, Probabilities<Config>& probabilities) {
  int32_t scores[Config::kMFragments][Config::kNFragments][4];
  compute_scores<Config, 0>(q, k_lane + chunk * (Config::kChunkN * Config::kKRowBytes), scores);
  float added[Config::kRows];
  const float limit = block.unsmoothed ? -1.0f : Config::kLimit;
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
  if (__builtin_expect(__any_sync(0xffffffffu, care), 0)) return false;
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) state.sum[row] += added[row];
  return true;
}

// The rows' first bases, from the first chunk, of which nothing is to be hidden: sooner than with care. What is no number, large, or so
// coarse that kMagic times its scale is rounded by more than a little is left to that: no probability might be left of the row.
template <typename Config>
__device__ __forceinline__ void find_bases(const Queries<Config>& q, uint32_t k_lane, const KeyBlock<Config>& block, State<Config>& state) {
  int32_t scores[Config::kMFragments][Config::kNFragments][4];
  compute_scores<Config, 0>(q, k_lane, scores);
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
    int32_t largest = 0;  // as integers they have the order of the floats whose bits they are
#pragma unroll
    for (int i = 0; i < Config::kNFragments * 2; ++i) largest = max(largest, scores[row / 2][i / 2][row % 2 * 2 + i % 2]);
    const float score = max_of_quad((__int_as_float(largest) - Config::kMagic) * block.scale[row]);
    if (fabsf(score) <= Config::kLargestBase && block.scale[row] <= Config::kCoarsest) state.base[row] = score - Config::kLevel;
  }
}

// Finds rows to be taken in two in a block of which nothing was to be hidden.
template <typename Config>
__device__ __forceinline__ void look_for_small(const KeyBlock<Config>& block, Probabilities<Config>& probabilities, const State<Config>& state,
                                               Progress& progress) {
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
    bool few = false;
#pragma unroll
    for (int group = 0; group < Config::kBlockN / 16; ++group) {
      few |= (group == 0 || block.look_in_all) && all_small<Config>(packed<Config>(probabilities, row, group));
    }
    const bool never = state.sum[row] > Config::kEnough || fabsf(state.base[row]) > Config::kLargestBase;
    // No branch: with one the compiler takes the lanes for divergent from here on.
    progress.in_two |= static_cast<uint32_t>(any_of_row(few) & !any_of_row(never)) << row;
  }
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

// Where to go on after a pass with care or a look. False: the block is not to meet V yet.
template <typename Config>
__device__ __forceinline__ bool proceed(const KeyBlock<Config>& block, Progress& progress) {
  switch (progress.pass) {
    case Pass::kFirst:
      // Another pass computes with care what the rows' sums may have without: where scores are coarse, powers of two apart.
      if (__any_sync(0xffffffffu, coarsest<Config>(block) > Config::kCoarsest)) progress.in_two = 0;
      if (!__any_sync(0xffffffffu, progress.in_two != 0)) break;
      progress.pass = Pass::kAgain;
      return false;
    case Pass::kAgain:
      progress.pass = Pass::kRest;
      break;
    case Pass::kRest:
      progress = {};
      break;
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
  bool with_care = false;
#pragma unroll
  for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
    if (!never_simple && exponentiate_if_simple<Config>(q, k_lane, block, chunk, state, probabilities)) continue;
    with_care = true;
    exponentiate_with_care<Config, 0>(p, shared, tile, q, k_lane, block, first_key, chunk, progress, state, probabilities);
    static_assert(Config::kMFragments <= 2);
    if constexpr (Config::kMFragments == 2) {
      __syncwarp();  // not both at a time: registers are short
      exponentiate_with_care<Config, 1>(p, shared, tile, q, k_lane, block, first_key, chunk, progress, state, probabilities);
    }
  }
  if constexpr (Config::kTwice) {
    static_assert(Config::kGatherN == Config::kBlockN);
    if (!with_care && __builtin_expect(block.look, 0)) {
      look_for_small<Config>(block, probabilities, state, progress);
      return proceed(block, progress);
    }
  }
  return !Config::kTwice || !with_care || proceed(block, progress);
}

}  // namespace sage
