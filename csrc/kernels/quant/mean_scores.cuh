// What subtracting Q's means takes off the scores: their products with K, less its own mean, in 16-bit numbers with float32 sums. A warp has
// some keys in registers and goes through the means.
#pragma once

#include "kernels/attention/quad.cuh"
#include "kernels/ptx/mma_sync.cuh"
#include "kernels/quant/keys_of_warp.cuh"

namespace sage {

// Of all heads of Q that share K: they lie one after the other, and so do their means and scores.
template <typename Config>
__device__ __forceinline__ void score_means(const typename Config::Params& p, const KvSpan& span, const KeysOfWarp<Config>& keys) {
  using Element = typename Config::Element;
  const int lane = threadIdx.x % 32;
  const int rows = p.q_heads / p.kv_heads * p.means;
  const auto* means = reinterpret_cast<const Element*>(p.q_mean) + span.mean * rows * Config::kHeadDim;
  const float* k_mean = p.k_mean == nullptr ? nullptr : p.k_mean + span.mean * Config::kHeadDim;
  const int64_t spans = p.cu_seqlens == nullptr ? (p.kv_len + Config::kSpanN - 1) / Config::kSpanN : slots(p.kv_len, p.sequences, Config::kSpanN);
  const int64_t head = int64_t{span.batch} * p.kv_heads + span.head;
  float* const scores = p.mean_scores + (span.index + head * (rows - 1) * spans) * Config::kSpanN + (keys.first_key - span.first_key) + lane % 4 * 2;

#pragma unroll 1
  for (int first = 0; first < rows; first += 16) {
    float sums[Config::kNFragments][4] = {};
    float products[2] = {};  // with K's mean
#pragma unroll
    for (int piece = 0; piece < Config::kPieces; ++piece) {
      const int channel = Config::channel(piece);
      uint4 mean[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = min(first + lane / 4 + 8 * i, rows - 1);
        mean[i] = *reinterpret_cast<const uint4*>(means + int64_t{row} * Config::kHeadDim + channel);
      }
      const uint32_t low[4] = {mean[0].x, mean[1].x, mean[0].y, mean[1].y}, high[4] = {mean[0].z, mean[1].z, mean[0].w, mean[1].w};
#pragma unroll
      for (int n = 0; n < Config::kNFragments; ++n) {
        const uint32_t(&key)[4] = keys.bits[piece][n];
        ptx::mma_m16n8k16_f32<Element>(sums[n], low, key[0], key[1]);
        ptx::mma_m16n8k16_f32<Element>(sums[n], high, key[2], key[3]);
      }
      float of_k[8];
      load_mean<Config>(of_k, k_mean, piece);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t bits[4] = {mean[i].x, mean[i].y, mean[i].z, mean[i].w};
        float of_q[8];
        unpack<Element>(of_q, bits);
#pragma unroll
        for (int j = 0; j < 8; ++j) products[i] += of_q[j] * of_k[j];
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float shift = sum_of_quad(products[i]);
      const int row = first + lane / 4 + 8 * i;
      if (row >= rows) continue;
#pragma unroll
      for (int n = 0; n < Config::kNFragments; ++n) {
        *reinterpret_cast<float2*>(scores + row * spans * Config::kSpanN + n * 8) =
            make_float2((sums[n][2 * i] - shift) * p.scale_log2, (sums[n][2 * i + 1] - shift) * p.scale_log2);
      }
    }
  }
}

}  // namespace sage
