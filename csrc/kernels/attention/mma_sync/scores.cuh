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
  // In log2 units: what probabilities are relative to. The row's largest score less kLogOfOne, lagging behind by up to
  // kRescaleThreshold.
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
  } else {
    probabilities[row / 2][group / 2][row % 2 + group % 2 * 2] = ptx::pack_e4m3x4(x[0], x[1], x[2], x[3]);
  }
}

// Multiplies what pack() packed in 8 bits: where the row's maximum has grown since.
template <typename Config>
__device__ __forceinline__ void rescale(Probabilities<Config>& probabilities, int row, int group, float factor) {
  uint32_t& bits = probabilities[row / 2][group / 2][row % 2 + group % 2 * 2];
  float x[4];
  ptx::unpack_e4m3x4(x, bits);
  bits = ptx::pack_e4m3x4(x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor);
}

// Turns scores into P's A fragments, keeping the running maximum and sum. `chunk` counts the
// chunks gathered before this one.
template <typename Config>
__device__ __forceinline__ void softmax(const float (&scale)[Config::kRows], const Scores<Config>& scores, int chunk,
                                        State<Config>& state, Probabilities<Config>& probabilities) {
  constexpr int kGroups = Config::kChunkN / 16;
  constexpr float kThreshold = Config::kRescaleThreshold + Config::kLogOfOne;
  float candidate[Config::kRows];
  bool exceeded = false;
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
    float largest = __int_as_float(scores[row / 2][0][row % 2 * 2]);
#pragma unroll
    for (int n = 0; n < Config::kNTiles; ++n) {
      largest = fmaxf(largest, __int_as_float(scores[row / 2][n][row % 2 * 2]));
      largest = fmaxf(largest, __int_as_float(scores[row / 2][n][row % 2 * 2 + 1]));
    }
    candidate[row] = (largest - Config::kMagic) * scale[row];
    exceeded |= candidate[row] > state.base[row] + kThreshold;
  }
  if (__builtin_expect(__any_sync(0xffffffffu, exceeded), 0)) {
#pragma unroll
    for (int row = 0; row < Config::kRows; ++row) {
      float largest = candidate[row];
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const bool grown = largest > state.base[row] + kThreshold;
      const float base = grown ? largest - Config::kLogOfOne : state.base[row];
      const float factor = grown ? ptx::ex2(state.base[row] - base) : 1.0f;
      state.base[row] = base;
      state.sum[row] *= factor;
      if constexpr (Config::kGatherN > Config::kChunkN) {
#pragma unroll
        for (int group = 0; group < chunk * kGroups; ++group) rescale<Config>(probabilities, row, group, factor);
      }
#pragma unroll
      for (int d = 0; d < Config::kOTiles; ++d) {
        state.out[row / 2][d][row % 2 * 2] *= factor;
        state.out[row / 2][d][row % 2 * 2 + 1] *= factor;
      }
    }
  }
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
      state.sum[row] += x[0] + x[1];
      state.sum[row] += x[2] + x[3];
      pack<Config>(probabilities, row, chunk * kGroups + pair, x);
    }
  }
}

}  // namespace sage
