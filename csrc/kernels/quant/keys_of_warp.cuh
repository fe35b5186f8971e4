// K in registers, as products with Q's means and scales of 16 channels want it.
#pragma once

#include "kernels/ptx/math.cuh"
#include "kernels/quant/kv_span.cuh"
#include "kernels/quant/quant_kv_fp4.h"

namespace sage {

struct QuantKFp4Config : QuantKFp4 {
  using Element = SAGE_DTYPE;
  static constexpr int kHeadDim = SAGE_HEAD_DIM;
  static constexpr int kThreads = QuantKvFp4::threads(kHeadDim);
  static constexpr int kKeys = kSpanN / (kThreads / 32);  // of a warp
  static constexpr int kNFragments = kKeys / 8;
  // Of 32 channels a lane takes eight, which are the fragments of two steps: which channel is which does not matter to a product.
  static constexpr int kPieces = kHeadDim / 32;
  static __device__ __forceinline__ int channel(int piece) { return piece * 32 + static_cast<int>(threadIdx.x) % 4 * 8; }
};

// K's mean in shared memory, in its dtype, which it has been rounded to; 0 where K is not smoothed.
template <typename Config>
struct alignas(16) MeanOfKeys {
  uint32_t bits[Config::kHeadDim / 2];

  // By a block of threads.
  __device__ __forceinline__ void fetch(const typename Config::Params& p, const KvSpan& span) {
    const int pair = threadIdx.x;
    if (pair < Config::kHeadDim / 2) {
      const float* mean = p.k_mean + span.mean * Config::kHeadDim + 2 * pair;
      bits[pair] = p.k_mean != nullptr ? Pair<typename Config::Element>::pack(mean[0], mean[1]) : 0u;
    }
    __syncthreads();
  }
  // This lane's channels of a piece, each time anew: there are no registers for those of all pieces.
  __device__ __forceinline__ uint4 load(int piece) const {
    int channel = Config::channel(piece);
    ptx::keep(channel);
    return *reinterpret_cast<const uint4*>(bits + channel / 2);
  }
};

// A warp's keys of a span: a lane has of key 8n + lane / 4 eight channels of each piece.
template <typename Config>
struct KeysOfWarp {
  int first_key;  // of the batch element or sequence
  uint32_t counts;  // a bit for each that does: others are past the end, or nobody sees them
  alignas(16) uint32_t bits[Config::kPieces][Config::kNFragments][4];

  __device__ __forceinline__ KeysOfWarp(const typename Config::Params& p, const KvSpan& span)
      : first_key(span.first_key + static_cast<int>(threadIdx.x) / 32 * Config::kKeys), counts(0) {
    const auto* k = row_pointer<typename Config::Element>(p.k, span.batch, span.head, span.first_token);
    const int lane = threadIdx.x % 32;
    const auto key = [&](int n) { return k + min(first_key + n * 8 + lane / 4, span.length - 1) * p.k.token_stride; };
#pragma unroll
    for (int piece = 0; piece < Config::kPieces; ++piece) load_rows<8>(bits[piece], key, Config::channel(piece), p.head_dim, p.k.aligned16);
    const SeenByQueries seen(p.seen, span.batch);
#pragma unroll
    for (int n = 0; n < Config::kNFragments; ++n) {
      const int mine = first_key + n * 8 + lane / 4;
      if (mine < span.length && seen(mine)) counts |= 1u << n;
    }
  }

  // What hides them does so by adding to their scores, which so shall be numbers.
  __device__ __forceinline__ void drop_others() {
#pragma unroll
    for (int n = 0; n < Config::kNFragments; ++n) {
      if (counts >> n & 1) continue;
#pragma unroll
      for (int piece = 0; piece < Config::kPieces; ++piece) {
#pragma unroll
        for (uint32_t& word : bits[piece][n]) word = 0;
      }
    }
  }

  __device__ __forceinline__ void keep() {
#pragma unroll
    for (int i = 0; i < Config::kPieces * Config::kNFragments * 4; ++i) ptx::keep(bits[i / 4 / Config::kNFragments][i / 4 % Config::kNFragments][i % 4]);
  }
};

}  // namespace sage
