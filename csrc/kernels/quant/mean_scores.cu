// What subtracting Q's means has taken off the scores: their products with K, less its own mean, in 16-bit numbers with float32 sums. A warp
// keeps some keys in registers and goes through the means.
#include "kernels/quant/mean_scores.h"

#include "kernels/attention/quad.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/mma_sync.cuh"
#include "kernels/quant/kv_span.cuh"

namespace sage {

struct Config : MeanScores {
  using Element = SAGE_DTYPE;
  static constexpr int kHeadDim = SAGE_HEAD_DIM;
  static constexpr int kKeys = kSpanN / (kThreads / 32);            // of a warp
  static constexpr int kKeysAtATime = kHeadDim <= 128 ? kKeys : 16;  // for which there are registers
  static constexpr int kNFragments = kKeysAtATime / 8;
  // Of 32 channels a lane takes eight, which are the fragments of two steps: which channel is which does not matter to a product.
  static constexpr int kPieces = kHeadDim / 32;
};

extern "C" __global__ void __launch_bounds__(Config::kThreads) mean_scores(const __grid_constant__ Config::Params p) {
  using Element = Config::Element;
  ptx::grid_dependency_launch();
  const KvSpan span(p.cu_seqlens, p.sequences, p.q_heads, p.kv_len, Config::kSpanN, 1);
  ptx::grid_dependency_wait();
  if (span.first_key >= span.length) return;
  const int lane = threadIdx.x % 32;
  const int kv_head = span.head / (p.q_heads / p.kv_heads);
  const bool packed = p.cu_seqlens != nullptr;
  // Where this head's means start, and its scores of the span.
  const auto* means = reinterpret_cast<const Element*>(p.q_mean) + span.mean * p.means * Config::kHeadDim;
  const int64_t row_keys = packed ? 0 : int64_t{(p.kv_len + Config::kSpanN - 1) / Config::kSpanN} * Config::kSpanN;
  float* const scores = packed ? p.scores + span.index * Config::kSpanN : p.scores + span.mean * p.means * row_keys + span.first_key;
  const float* k_mean = p.k_mean;
  if (k_mean != nullptr) {
    const int64_t sequence = span.mean / p.q_heads;
    k_mean += (sequence * p.kv_heads + kv_head) * Config::kHeadDim + lane % 4 * 8;
  }
  const auto* k = row_pointer<Element>(p.k, span.batch, kv_head, span.first_token);

#pragma unroll 1
  for (int first = threadIdx.x / 32 * Config::kKeys; first < (static_cast<int>(threadIdx.x) / 32 + 1) * Config::kKeys; first += Config::kKeysAtATime) {
    uint32_t keys[Config::kPieces][Config::kNFragments][4];
#pragma unroll
    for (int piece = 0; piece < Config::kPieces; ++piece) {
      const auto key = [&](int n) { return k + min(span.first_key + first + n * 8 + lane / 4, span.length - 1) * p.k.token_stride; };
      load_rows<8>(keys[piece], key, piece * 32 + lane % 4 * 8, p.head_dim, p.k.aligned16);
    }
#pragma unroll 1
    for (int mean = 0; mean < p.means; mean += 16) {
      float sums[Config::kNFragments][4] = {};
      float of_k_mean[2] = {};
#pragma unroll
      for (int piece = 0; piece < Config::kPieces; ++piece) {
        uint4 rows[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = min(mean + lane / 4 + 8 * i, p.means - 1);
          rows[i] = *reinterpret_cast<const uint4*>(means + int64_t{row} * Config::kHeadDim + piece * 32 + lane % 4 * 8);
        }
        const uint32_t low[4] = {rows[0].x, rows[1].x, rows[0].y, rows[1].y}, high[4] = {rows[0].z, rows[1].z, rows[0].w, rows[1].w};
#pragma unroll
        for (int n = 0; n < Config::kNFragments; ++n) {
          ptx::mma_m16n8k16_f32<Element>(sums[n], low, keys[piece][n][0], keys[piece][n][1]);
          ptx::mma_m16n8k16_f32<Element>(sums[n], high, keys[piece][n][2], keys[piece][n][3]);
        }
        if (k_mean != nullptr) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t bits[4] = {rows[i].x, rows[i].y, rows[i].z, rows[i].w};
            float x[8];
            unpack<Element>(x, bits);
#pragma unroll
            for (int j = 0; j < 8; ++j) of_k_mean[i] += x[j] * k_mean[piece * 32 + j];
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float shift = sum_of_quad(of_k_mean[i]);
        const int row = mean + lane / 4 + 8 * i;
        if (row >= p.means) continue;
#pragma unroll
        for (int n = 0; n < Config::kNFragments; ++n) {
          *reinterpret_cast<float2*>(scores + row * row_keys + first + n * 8 + lane % 4 * 2) =
              make_float2((sums[n][2 * i] - shift) * p.scale_log2, (sums[n][2 * i + 1] - shift) * p.scale_log2);
        }
      }
    }
  }
}

}  // namespace sage
