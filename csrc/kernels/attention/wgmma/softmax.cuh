// Hopper's attention kernel: from a block's scores to its probabilities.
#pragma once

#include "kernels/attention/quad.cuh"
#include "kernels/attention/wgmma/config.cuh"
#include "kernels/element.cuh"
#include "kernels/ptx/math.cuh"

namespace sage {

using Scores = int32_t[Config::kBlockN / 2];
using Probabilities = uint32_t[Config::kPvSteps][4];  // wgmma A fragments
using Queries = uint32_t[Config::kQkSteps][4];        // wgmma A fragments
using Output = float[Config::kHeadDim / 2];

// A score that a mask hides: below any that is computed.
constexpr int32_t kHiddenScore = -(1 << 30);

// What a lane keeps of its two rows (lane / 4 and lane / 4 + 8 of the warp's 16) from block to block of keys.
struct Rows {
  float q_scale[2];
  float base[2];   // in log2 units, less kLevel: what probabilities are relative to
  float sum[2];    // this lane's columns only
  float k_limit;   // keys whose bound is at most this cannot exceed either base by more than kBoundHeadroom
};

// -infinity, as it were, for keys past the last and, if causal, past the row.
__device__ __forceinline__ void hide_past_end(bool causal, int kv_len, int first_key, int first_row, Scores& scores) {
  const int lane = Config::kKeepLane ? threadIdx.x % 32 : ptx::lane_here();
#pragma unroll
  for (int i = 0; i < Config::kBlockN / 2; ++i) {
    const int key = first_key + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (key >= kv_len || (causal && key > first_row + i / 2 % 2 * 8 + lane / 4)) scores[i] = kHiddenScore;
  }
}

// The largest score of this lane in each row, in log2 units.
__device__ __forceinline__ void find_largest(const Scores& scores, float k_scale, const Rows& rows, float (&largest)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    int32_t score = kHiddenScore;
#pragma unroll
    for (int i = row * 2; i < Config::kBlockN / 2; i += 4) score = max(score, max(scores[i], scores[i + 1]));
    largest[row] = score == kHiddenScore ? -INFINITY : static_cast<float>(score) * (rows.q_scale[row] * k_scale);
  }
}

__device__ __forceinline__ void rescale_row(int row, float factor, Output& out) {
#pragma unroll
  for (int i = row * 2; i < Config::kHeadDim / 2; i += 4) {
    out[i] *= factor;
    out[i + 1] *= factor;
  }
}

// What the output is to be rescaled by once it is there.
struct Rescaling {
  bool due = false;  // the same in all lanes
  float factors[2];

  __device__ __forceinline__ void add(int row, float factor) {
    factors[row] = due ? factors[row] * factor : factor;
    if (row == 1) due = true;
  }
  __device__ __forceinline__ void apply(Output& out) const {
    if (!due) return;
#pragma unroll
    for (int row = 0; row < 2; ++row) rescale_row(row, factors[row], out);
  }
};

// Where what shared memory holds of a block's rows has a lane's: one of its two.
__device__ __forceinline__ int row_of_block(int row) { return threadIdx.x / 32 * 16 - 64 + threadIdx.x % 32 / 4 + row * 8; }

// What a lane's row is multiplied by beside sm_scale: less than 1 once its scores have been beyond measure.
__device__ __forceinline__ float unit_of(int row, const Rows& rows, const Memory& shared) {
  const float first = shared.at<float>(Shared::kQScale)[row_of_block(row)];
  return first > 0.0f ? ptx::divide(rows.q_scale[row], first) : 1.0f;
}

// Natural logarithm, of a row whose probabilities add up to `sum`; of none that it sees -infinity.
__device__ __forceinline__ float log_sum_exp(int row, float sum, const Rows& rows, const Memory& shared) {
  const float log_sum = ptx::divide(rows.base[row] + ptx::lg2(sum), unit_of(row, rows, shared)) + shared.at<float>(Shared::kQShift)[row_of_block(row)];
  return sum == 0.0f ? -INFINITY : log_sum * static_cast<float>(kLn2);
}

// Has a row relative to another base if that has grown, and limits keys anew. Returns what the output is to be rescaled by.
__device__ __forceinline__ float move_base(int row, bool grown, float base, const float* q_reach, Rows& rows) {
  const float factor = grown ? ptx::ex2(rows.base[row] - base) : 1.0f;
  if (grown) rows.base[row] = base;
  // Not a number where the bound is none, which keeps the comparison with it false.
  rows.k_limit = ptx::min_nan(rows.k_limit, (rows.base[row] + (Config::kBoundHeadroom + Config::kLevel)) * q_reach[row * 8]);
  rows.sum[row] *= factor;
  return factor;
}

// Raises the bases that a block's largest scores exceed by more than the headroom. `vote` says whether any of those that go together
// does, and `rescale` is told of what was added up under the old ones.
template <typename Vote, typename Rescale>
__device__ __forceinline__ void raise_bases(float (&largest)[2], const float* q_reach, Rows& rows, const Vote& vote,
                                                 const Rescale& rescale) {
  bool exceeded = false;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    largest[row] -= Config::kLevel;
    exceeded |= largest[row] > rows.base[row] + Config::kHeadroom;
  }
  if (!vote(exceeded)) return;
  rows.k_limit = INFINITY;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    largest[row] = max_of_quad(largest[row]);
    const bool grown = largest[row] > rows.base[row] + Config::kHeadroom;
    // Where scores are beyond measure, one outweighs all others in any unit: a larger one, from here on, keeps their differences exact.
    if (grown && fabsf(largest[row]) > Config::kLargestScore) {
      const float factor = ptx::divide(Config::kLargestScore, fabsf(largest[row]));
      rows.q_scale[row] *= factor;
      rows.base[row] = (rows.base[row] + Config::kLevel) * factor - Config::kLevel;
      largest[row] = (largest[row] + Config::kLevel) * factor - Config::kLevel;
    }
    rescale(row, move_base(row, grown, largest[row], q_reach, rows));
  }
}

// Raises the bases of rows of which a lane's sum is too large, and makes the block's probabilities, which are in float32 yet, relative
// to the new ones.
template <typename Vote, typename Rescale>
__device__ __forceinline__ void lower_probabilities(const float* q_reach, Scores& scores, float (&sums)[2], Rows& rows, const Vote& vote,
                                                    const Rescale& rescale) {
  if (!vote(sums[0] > Config::kLargestSum || sums[1] > Config::kLargestSum)) return;
  rows.k_limit = INFINITY;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float largest = 0.0f;
#pragma unroll
    for (int i = row * 2; i < Config::kBlockN / 2; i += 4) {
      largest = fmaxf(largest, fmaxf(__int_as_float(scores[i]), __int_as_float(scores[i + 1])));
    }
    const bool grown = any_of_row(sums[row] > Config::kLargestSum);
    const float base = rows.base[row] + (ptx::lg2(max_of_quad(largest)) - Config::kLevel);
    const float factor = move_base(row, grown, base, q_reach, rows);
    rescale(row, factor);
    sums[row] *= factor;
#pragma unroll
    for (int i = row * 2; i < Config::kBlockN / 2; i += 4) {
#pragma unroll
      for (int j = i; j < i + 2; ++j) scores[j] = __float_as_int(__int_as_float(scores[j]) * factor);
    }
  }
}

// Replaces a block's scores by their unnormalised probabilities, as float bits, and adds up those of this lane.
//
// Left to itself the compiler computes all exponents before the first exponential, and the warp then waits eight clocks for each.
// So each chunk's scale is made to depend on results of the chunk two before it, which lets one fill the other's waits: on half of them to
// head_dim 128, where the instructions for the others cost more than they bring (bench/notes-hopper.md).
template <bool Masked>
__device__ __forceinline__ void make_probabilities(Scores& scores, float k_scale, const Rows& rows, float (&sums)[2]) {
  constexpr int kChunk = 8;  // scores, of both rows
  constexpr int kChunks = Config::kBlockN / 2 / kChunk;
  constexpr int kFirstOfDependences = Config::kHeadDim <= 128 ? kChunk / 2 : 0;
  float scale[kChunks + 2][2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    scale[0][row] = scale[1][row] = rows.q_scale[row] * k_scale;
    sums[row] = -0.0f;  // which the first sum leaves out
  }
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int row = 0; row < 2; ++row) scale[chunk + 2][row] = scale[chunk][row];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const int row = i / 2 % 2;
      int32_t& score = scores[chunk * kChunk + i];
      float exponent = static_cast<float>(score) * scale[chunk][row] - rows.base[row];
      if (Masked && score == kHiddenScore) exponent = -INFINITY;
      const float probability = ptx::ex2(exponent);
      if (i % 2 == 1 && i >= kFirstOfDependences) scale[chunk + 2][row] = __fmaf_rn(probability, 0.0f, scale[chunk + 2][row]);
      sums[row] += probability;
      score = __float_as_int(probability);
    }
  }
}

__device__ __forceinline__ void pack(const Scores& scores, Probabilities& probabilities) {
#pragma unroll
  for (int i = 0; i < Config::kBlockN / 4; ++i) {
    // Two groups of 8 columns are a 16-key step: registers row, row + 8 of the first, then of the second.
    probabilities[i / 4][i % 4] =
        Pair<Config::Element>::pack(__int_as_float(scores[2 * i]), __int_as_float(scores[2 * i + 1]));
  }
}

}  // namespace sage
