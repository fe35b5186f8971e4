// What subtracting Q's means takes off the scores: their products with K, less its own mean, in 16-bit numbers with float32 sums. A warp has
// some keys in registers and goes through the means.
#pragma once

#include "kernels/ptx/mma_sync.cuh"
#include "kernels/quant/keys_of_warp.cuh"

namespace sage {

// Of all heads of Q that share K: they lie one after the other, and so do their means and scores.
template <typename Config>
__device__ __forceinline__ void score_means(const typename Config::Params& p, const KvSpan& span, const KeysOfWarp<Config>& keys,
                                            const MeanOfKeys<Config>& mean_of_keys, int part) {
  using Element = typename Config::Element;
  const int lane = threadIdx.x % 32;
  const int rows = p.q_heads / p.kv_heads * p.means;
  const auto* means = reinterpret_cast<const Element*>(p.q_mean) + span.mean * rows * Config::kHeadDim;
  const int64_t spans = p.cu_seqlens == nullptr ? (p.kv_len + Config::kSpanN - 1) / Config::kSpanN : slots(p.kv_len, p.sequences, Config::kSpanN);
  const int64_t head = int64_t{span.batch} * p.kv_heads + span.head;
  float* const scores = p.mean_scores + (span.index + head * (rows - 1) * spans) * Config::kSpanN + (keys.first_key - span.first_key) + lane % 4 * 2;
  // Under a causal mask a head's first rows see nothing of the span, and nothing reads what would be their mean's.
  const int seen = p.causal != 0 && p.means > 1 ? span.first_key / Config::kRows : 0;

#pragma unroll 1
  for (int first = part * Config::kMeans; first < rows; first += p.parts * Config::kMeans) {
    if (first % p.means + Config::kMeans - 1 < seen) continue;
    float sums[Config::kNFragments][4] = {};
    float shift[4] = {};  // K's mean as one more key, in all columns
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
      const uint4 of_keys = mean_of_keys.load(piece);
      ptx::mma_m16n8k16_f32<Element>(shift, low, of_keys.x, of_keys.y);
      ptx::mma_m16n8k16_f32<Element>(shift, high, of_keys.z, of_keys.w);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first + lane / 4 + 8 * i;
      if (row >= rows || (seen > 0 && row % p.means < seen)) continue;
#pragma unroll
      for (int n = 0; n < Config::kNFragments; ++n) {
        *reinterpret_cast<float2*>(scores + row * spans * Config::kSpanN + n * 8) =
            make_float2((sums[n][2 * i] - shift[2 * i]) * p.scale_log2, (sums[n][2 * i + 1] - shift[2 * i]) * p.scale_log2);
      }
    }
  }
}

}  // namespace sage
