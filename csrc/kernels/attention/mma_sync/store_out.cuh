// The output and log-sum-exp.
#pragma once

#include "kernels/attention/mma_sync/softmax.cuh"
#include "kernels/attention/quad.cuh"

namespace sage {

// Divides what a lane has of the output by its rows' sums and writes it. `sum_of(row)` is the sum of the row's probabilities, `smoothed_of(row, sum)`
// that of those that fell on keys whose V was smoothed: asked only where some were.
template <typename Config, typename SumOf, typename SmoothedOf>
__device__ __forceinline__ void store_rows(const AttentionParams& p, const Tile& tile,
                                           const float (&out)[Config::kMFragments][Config::kOFragments][4],
                                           const float (&base)[Config::kRows], const SumOf& sum_of, const SmoothedOf& smoothed_of) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
    const float sum = sum_of(row);
    // A row that sees no key is zero.
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    const float unit = Config::kScaled ? inverse * QuantV::kScaleUnit : inverse;
    float smoothed = 0.0f;  // the share of P that fell on keys whose V was
    if constexpr (Config::kSmooths) {
      if (p.v_mean != nullptr) smoothed = smoothed_of(row, sum) * inverse;
    }
    const int token = tile.first_row + threadIdx.x / 32 * Config::kWarpM + row * 8 + lane / 4;
    if (token >= tile.qo_len) continue;

    auto* destination = row_pointer<uint16_t>(p.out, tile.batch, tile.head, tile.q_token + token);
#pragma unroll
    for (int d = 0; d < Config::kOFragments; ++d) {
      const int channel = d * 8 + lane % 4 * 2;
      float low = out[row / 2][d][row % 2 * 2] * unit;
      float high = out[row / 2][d][row % 2 * 2 + 1] * unit;
      if (Config::kSmooths && p.v_mean != nullptr && sum != 0.0f) {
        const float* mean = p.v_mean + tile.kv_mean * Config::kHeadDim + channel;
        low += mean[0] * smoothed;
        high += mean[1] * smoothed;
      }
      const uint32_t pair = Pair<typename Config::Element>::pack(low, high);
      if (p.out.aligned16) {
        if (channel < p.v_head_dim) *reinterpret_cast<uint32_t*>(destination + channel) = pair;
      } else {
        if (channel < p.v_head_dim) destination[channel] = pair;
        if (channel + 1 < p.v_head_dim) destination[channel + 1] = pair >> 16;
      }
    }
    if (p.lse != nullptr && lane % 4 == 0) {
      float* lse = p.lse + tile.lse + token;
      const float shift = p.k_mean != nullptr ? *lse : 0.0f;
      *lse = sum == 0.0f ? -INFINITY : (base[row] + ptx::lg2(sum) + shift) * static_cast<float>(kLn2);
    }
  }
}

template <typename Config>
__device__ __forceinline__ void store_out(const AttentionParams& p, uint32_t shared, const Tile& tile, const State<Config>& state) {
  store_rows<Config>(
      p, tile, state.out, state.base, [&](int row) { return sum_of_quad(state.sum[row]); },
      [&](int row, float sum) { return sum - sum_of_quad(ptx::load_shared_float(unsmoothed_sum<Config>(shared, row))); });
}

}  // namespace sage
