// Scores of a chunk of keys, masked, and their probabilities.
#pragma once

#include "kernels/attention/mma_sync/config.cuh"
#include "kernels/attention/mma_sync/mask_value.cuh"
#include "kernels/attention/tile.cuh"
#include "kernels/element.cuh"
#include "kernels/ptx/float8.cuh"
#include "kernels/ptx/ldmatrix.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/mma_sync.cuh"

namespace sage {

// C fragments: of each 16 rows and 8 keys, rows lane / 4 and lane / 4 + 8, keys lane % 4 * 2 and the next.
template <typename Config>
using Scores = int32_t[Config::kMTiles][Config::kNTiles][4];
template <typename Config>
using Probabilities = uint32_t[Config::kMTiles][Config::kPvSteps][4];  // A fragments
template <typename Config>
using Queries = uint32_t[Config::kMTiles][Config::kQkSteps][4];  // A fragments

template <typename Config>
struct State {
  float out[Config::kMTiles][Config::kOTiles][4];
  // In log2 units: what probabilities are relative to. The row's largest score less kLogOfOne when it was last raised.
  float base[Config::kRows];
  float sum[Config::kRows];  // this lane's columns only
};

// Scores for the warp's rows, as floats kMagic + score in the accumulators' bits.
template <typename Config>
__device__ __forceinline__ void compute_scores(const Queries<Config>& q, uint32_t k_lane, Scores<Config>& scores) {
#pragma unroll
  for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
    for (int n = 0; n < Config::kNTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[m][n][i] = Config::kMagicBits;
    }
  }
#pragma unroll
  for (int step = 0; step < Config::kQkSteps; ++step) {
#pragma unroll
    for (int pair = 0; pair < Config::kNTiles / 2; ++pair) {
      uint32_t k[4];
      ptx::ldmatrix_x4(k, ((k_lane + pair * 16 * Config::kKRowBytes) ^ (step % 4 * 32)) + step / 4 * (Config::kBlockN * 128));
#pragma unroll
      for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          ptx::mma_m16n8k32_s8(scores[m][pair * 2 + half], q[m][step], k[half * 2], k[half * 2 + 1]);
        }
      }
    }
  }
}

// -infinity for keys past the end and, if causal, past the row.
template <typename Config>
__device__ __forceinline__ void hide_scores(const AttentionParams& p, const Tile& tile, int first_key,
                                            Scores<Config>& scores) {
  const int lane = threadIdx.x % 32;
  const int first_row = tile.first_row + threadIdx.x / 32 * Config::kWarpM + lane / 4;
#pragma unroll
  for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
    for (int n = 0; n < Config::kNTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first_key + n * 8 + lane % 4 * 2 + i % 2;
        const int row = first_row + m * 16 + i / 2 * 8;
        if (key >= tile.kv_len || (p.causal && key > row)) scores[m][n][i] = 0xff800000;
      }
    }
  }
}

// Adds the mask to the scores, in their unit: that costs as little precision as reading them as floats does. Hides what
// hide_scores does.
template <typename Config>
__device__ __forceinline__ void mask_scores(const AttentionParams& p, const Tile& tile, int first_key,
                                            const float (&scale)[Config::kRows], Scores<Config>& scores) {
  const int lane = threadIdx.x % 32;
  const int row0 = tile.first_row + threadIdx.x / 32 * Config::kWarpM + lane / 4;
  const int key0 = first_key + lane % 4 * 2;
  const auto* origin = static_cast<const uint8_t*>(p.mask.data) + tile.batch * p.mask.batch_stride +
                       tile.head * p.mask.head_stride + row0 * p.mask.row_stride + key0 * p.mask.key_stride;
  // How many rows and keys there are from here on, and how much further than a row a key may be.
  const int rows = tile.qo_len - row0;
  const int keys = tile.kv_len - key0;
  const int diagonal = p.causal ? row0 - key0 : 1 << 30;
#pragma unroll
  for (int i = 0; i < Config::kRows; ++i) {
    const int row = i * 8;
    const float unit = __frcp_rn(scale[i]);
#pragma unroll
    for (int j = 0; j < Config::kNTiles * 2; ++j) {
      const int key = j / 2 * 8 + j % 2;
      int32_t& score = scores[i / 2][j / 2][i % 2 * 2 + j % 2];
      float masked = -INFINITY;
      if (key < keys && row < rows && key - row <= diagonal) {
        // Within a tile 32 bits do: torch/attention.cpp sees to it.
        const int offset = row * static_cast<int>(p.mask.row_stride) + key * static_cast<int>(p.mask.key_stride);
        masked = __int_as_float(score) + mask_value(p.mask.type, origin + offset) * unit;
      }
      score = __float_as_int(masked);
    }
  }
}

// Probabilities of a row and 16 keys, the group-th of those gathered.
template <typename Config>
__device__ __forceinline__ void pack(Probabilities<Config>& probabilities, int row, int group, const float (&x)[4]) {
  // The C fragments of two 8-key tiles are the A fragment of a 16-key step. In 8 bits those of four are that of a 32-key step,
  // if in each 16 keys V's are taken in the order 0 1 8 9, 2 3 10 11, ...
  if constexpr (Config::kValues == Values::kF16) {
    probabilities[row / 2][group][row % 2] = Pair<typename Config::Element>::pack(x[0], x[1]);
    probabilities[row / 2][group][row % 2 + 2] = Pair<typename Config::Element>::pack(x[2], x[3]);
  } else if constexpr (Config::kConvert) {
    ptx::unpack_e4m3x4(probabilities[row / 2][group][row % 2], probabilities[row / 2][group][row % 2 + 2],
                       ptx::pack_e4m3x4(x[0], x[1], x[2], x[3]));
  } else {
    probabilities[row / 2][group / 2][row % 2 + group % 2 * 2] = ptx::pack_e4m3x4(x[0], x[1], x[2], x[3]);
  }
}

// Multiplies what pack() packed: where the row's base has grown since.
template <typename Config>
__device__ __forceinline__ void rescale(Probabilities<Config>& probabilities, int row, int group, float factor) {
  if constexpr (Config::kConvert) {
    const __half2 factors = __float2half2_rn(factor);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      auto& pair = reinterpret_cast<__half2&>(probabilities[row / 2][group][row % 2 + i * 2]);
      pair = __hmul2(pair, factors);
    }
  } else {
    uint32_t& bits = probabilities[row / 2][group / 2][row % 2 + group % 2 * 2];
    uint32_t pairs[2];
    ptx::unpack_e4m3x4(pairs[0], pairs[1], bits);
    float x[4];
    unpack<__half>(x, pairs);
    bits = ptx::pack_e4m3x4(x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor);
  }
}

// Probabilities of a chunk relative to the rows' bases, packed, and what this lane adds up of each row.
template <typename Config>
__device__ __forceinline__ void exponentiate(const float (&scale)[Config::kRows], const Scores<Config>& scores, int chunk,
                                             const State<Config>& state, Probabilities<Config>& probabilities,
                                             float (&added)[Config::kRows]) {
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
    const float offset = -Config::kMagic * scale[row] - state.base[row];
#pragma unroll
    for (int pair = 0; pair < Config::kNTiles / 2; ++pair) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = ptx::ex2(__int_as_float(scores[row / 2][pair * 2 + i / 2][row % 2 * 2 + i % 2]) * scale[row] + offset);
      }
      const float sum = (x[0] + x[1]) + (x[2] + x[3]);
      added[row] = pair == 0 ? sum : added[row] + sum;
      pack<Config>(probabilities, row, chunk * (Config::kChunkN / 16) + pair, x);
    }
  }
}

// Raises the bases of rows of which some lane has added up more than kLimit to their largest score of this chunk, and
// brings along what was computed relative to them.
template <typename Config>
__device__ __forceinline__ void raise_bases(const float (&scale)[Config::kRows], const Scores<Config>& scores, int chunk,
                                            const float (&added)[Config::kRows], State<Config>& state,
                                            Probabilities<Config>& probabilities) {
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
    float largest = __int_as_float(scores[row / 2][0][row % 2 * 2]);
#pragma unroll
    for (int n = 0; n < Config::kNTiles; ++n) {
      largest = fmaxf(largest, __int_as_float(scores[row / 2][n][row % 2 * 2]));
      largest = fmaxf(largest, __int_as_float(scores[row / 2][n][row % 2 * 2 + 1]));
    }
    largest = (largest - Config::kMagic) * scale[row];
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const bool raise = __ballot_sync(0xffffffffu, added[row] > Config::kLimit) >> (threadIdx.x % 32 & ~3) & 15;
    const float base = raise ? largest - Config::kLogOfOne : state.base[row];
    const float factor = raise ? ptx::ex2(state.base[row] - base) : 1.0f;
    state.base[row] = base;
    state.sum[row] *= factor;
    if constexpr (Config::kGatherN > Config::kChunkN) {
#pragma unroll
      for (int group = 0; group < chunk * (Config::kChunkN / 16); ++group) rescale<Config>(probabilities, row, group, factor);
    }
#pragma unroll
    for (int d = 0; d < Config::kOTiles; ++d) {
      state.out[row / 2][d][row % 2 * 2] *= factor;
      state.out[row / 2][d][row % 2 * 2 + 1] *= factor;
    }
  }
}

// Turns the scores of the keys from first_key on into P's A fragments, keeping the running base and sum. `chunk` counts the
// chunks gathered before this one. Almost always nothing is to be hidden and no base need be raised: all else waits behind one
// branch and computes everything again, the scores too, so that they need not be kept.
template <typename Config>
__device__ __forceinline__ void softmax(const AttentionParams& p, const Tile& tile, const Queries<Config>& q, uint32_t k_lane,
                                        int masked, int first_key, const float (&scale)[Config::kRows],
                                        const Scores<Config>& scores, int chunk, State<Config>& state,
                                        Probabilities<Config>& probabilities) {
  float added[Config::kRows];
  exponentiate<Config>(scale, scores, chunk, state, probabilities, added);
  bool redo = masked != AttentionMask::kFull;
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) redo |= added[row] > Config::kLimit;
  if (__builtin_expect(__any_sync(0xffffffffu, redo), 0)) {
    Scores<Config> again;
    compute_scores<Config>(q, k_lane, again);
    if (masked == AttentionMask::kMixed) {
      mask_scores<Config>(p, tile, first_key, scale, again);
    } else if (masked == AttentionMask::kEmpty) {
      hide_scores<Config>(p, tile, first_key, again);
    }
    exponentiate<Config>(scale, again, chunk, state, probabilities, added);
    raise_bases<Config>(scale, again, chunk, added, state, probabilities);
    exponentiate<Config>(scale, again, chunk, state, probabilities, added);
  }
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) state.sum[row] += added[row];
}

}  // namespace sage
