// Attention of 16 rows by a warp, in 16 bits with float32 sums, all in registers: it shares nothing, and waits for no other warp.
//
// Products may add up channels, and keys, in any order. So where a fragment has pairs that lie apart, a lane takes eight neighbouring
// channels, and reads and writes 16 bytes at once; and of a block's keys it takes neighbours too, whose mask lies together.
#pragma once

#include <cuda/std/type_traits>

#include "kernels/attention/mma_sync_in_16_bits/keys.cuh"
#include "kernels/attention/mma_sync_in_16_bits/row_out.cuh"
#include "kernels/attention/mask_value.cuh"
#include "kernels/attention/quad.cuh"
#include "kernels/attention/sm80_qk_f16_pv_f16.h"
#include "kernels/element.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/mma_sync.cuh"
#include "kernels/ptx/movmatrix.cuh"

namespace sage {

// A lane's scores of a block: [tile][row * 2 + key % 2], of rows lane / 4 and 8 further.
using Scores = float[Config::kTiles][4];

// Adds to a row's scores what a mask says of the lane's keys, the first of which is there: read at once if they lie together. Those past
// the last key are hidden in any case.
template <AttentionMask::Type kType>
__device__ __forceinline__ void add_mask(Scores& scores, int row, const uint8_t* first, int64_t key_stride, bool together, int keys) {
  constexpr int kSize = kType == AttentionMask::kBool ? 1 : kType == AttentionMask::kFloat ? 4 : 2;
  struct alignas(kSize * Config::kRun) { uint32_t words[kSize * Config::kRun / 4]; } run = {};
  if (together && keys >= Config::kRun) {
    run = *reinterpret_cast<const decltype(run)*>(first);
  } else {
#pragma unroll
    for (int i = 0; i < Config::kRun; ++i) {
      if (i >= keys) continue;
      const uint8_t* element = first + i * key_stride;
      const uint32_t bits = kSize == 1   ? *element
                            : kSize == 2 ? *reinterpret_cast<const uint16_t*>(element)
                                         : *reinterpret_cast<const uint32_t*>(element);
      run.words[i * kSize / 4] |= bits << i * kSize % 4 * 8;
    }
  }
#pragma unroll
  for (int i = 0; i < Config::kRun; ++i) {
    const uint32_t bits = run.words[i * kSize / 4] >> i * kSize % 4 * 8;
    scores[i / 2][row * 2 + i % 2] += mask_value(kType, kSize == 1 ? bits & 0xff : kSize == 2 ? bits & 0xffff : bits);
  }
}

// Calls a function of one of these types.
template <typename Function>
__device__ __forceinline__ void with_type(int type, const Function& function) {
  using cuda::std::integral_constant;
  if (type == AttentionMask::kBool) return function(integral_constant<AttentionMask::Type, AttentionMask::kBool>{});
  if (type == AttentionMask::kFloat) return function(integral_constant<AttentionMask::Type, AttentionMask::kFloat>{});
  if (type == AttentionMask::kHalf) return function(integral_constant<AttentionMask::Type, AttentionMask::kHalf>{});
  function(integral_constant<AttentionMask::Type, AttentionMask::kBfloat16>{});
}

// Of rows lane / 4 and 8 further, as far as their keys have been looked at.
struct Sums {
  float out[Config::kPieces][4][4] = {};                // [piece][word][row * 2 + channel % 2]
  float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {};  // score, in log2 units; a lane's own probabilities
};

// A lane's channels of one of its rows: what has been added up, or what that makes of the output.
__device__ __forceinline__ void store_sums(const Sums& sums, int row, float* to, int channels) {
#pragma unroll
  for (int piece = 0; piece < Config::kPieces; ++piece) {
    const int channel = piece * 32 + threadIdx.x % 4 * 8;
    if (channel >= channels) continue;
#pragma unroll
    for (int word = 0; word < 4; word += 2) {
      const float(&low)[4] = sums.out[piece][word];
      const float(&high)[4] = sums.out[piece][word + 1];
      *reinterpret_cast<float4*>(to + channel + word * 2) = make_float4(low[row * 2], low[row * 2 + 1], high[row * 2], high[row * 2 + 1]);
    }
  }
}
__device__ __forceinline__ void store_row(const Sums& sums, int row, Config::Element* to, int channels) {
  const float inverse = inverse_of(sums.sum[row]);
#pragma unroll
  for (int piece = 0; piece < Config::kPieces; ++piece) {
    const int channel = piece * 32 + threadIdx.x % 4 * 8;
    uint32_t words[4];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      words[word] = Pair<Config::Element>::pack(sums.out[piece][word][row * 2] * inverse, sums.out[piece][word][row * 2 + 1] * inverse);
    }
    if (channel < channels) *reinterpret_cast<uint4*>(to + channel) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// All keys before `end`, by blocks.
struct AllKeys {
  int end, block = -Config::kBlockN;
  __device__ __forceinline__ int next() { return block += Config::kBlockN; }
};

// Keys of a head, as `source` has them (keys.cuh).
//   keys.next()                 blocks in turn; `keys.end` or more: there is none
//   rows.load_q(words, piece)   a piece of the lane's rows of Q
//   rows.mask(row)              what the mask says of key 0
//   rows.last_key(row)          that the row sees, under a causal mask
template <typename Rows, typename Keys, typename Source>
__device__ __forceinline__ void attend(Sums& sums, const Config::Params& p, const Rows& rows, Keys keys, Source source) {
  using Element = Config::Element;
  const int lane = threadIdx.x % 32;
  auto& [out, largest, sum] = sums;
  uint32_t q[Config::kPieces][2][4];
#pragma unroll
  for (int piece = 0; piece < Config::kPieces; ++piece) rows.load_q(q[piece], piece);
  if constexpr (!Config::kAhead) {
#pragma unroll
    for (int i = 0; i < Config::kPieces * 2; ++i) Config::q_of_lane()[i * 32] = *reinterpret_cast<const uint4*>(q[i / 2][i % 2]);
  }
  Block k, v;
  int block = keys.next();
  source.start_k(k, block);

#pragma unroll 1
  for (int next; block < keys.end; block = next) {
    source.start_v(v, block);

    Scores scores = {};
#pragma unroll
    for (int piece = 0; piece < Config::kPieces; ++piece) {
      source.k(k, piece);
      if constexpr (!Config::kAhead) {
        int place = piece * 64;
        ptx::keep(place);  // as if it were another each time: else registers keep all of Q
#pragma unroll
        for (int row = 0; row < 2; ++row) *reinterpret_cast<uint4*>(q[piece][row]) = Config::q_of_lane()[place + row * 32];
      }
#pragma unroll
      for (int half = 0; half < 4; half += 2) {
        const uint32_t fragment[4] = {q[piece][0][half], q[piece][1][half], q[piece][0][half + 1], q[piece][1][half + 1]};
#pragma unroll
        for (int tile = 0; tile < Config::kTiles; ++tile) {
          ptx::mma_m16n8k16_f32<Element>(scores[tile], fragment, k[piece][tile][half], k[piece][tile][half + 1]);
        }
      }
    }
    next = keys.next();
    if (next < keys.end) source.start_k(k, next);
    else source.no_k();

    // In log2 units; what is not seen becomes -infinity.
    const int first_key = block + lane % 4 * Config::kRun;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int i = 0; i < Config::kRun; ++i) scores[i / 2][row * 2 + i % 2] *= p.scale_log2;
      if (p.mask.data != nullptr) {
        const uint8_t* first = rows.mask(row) + first_key * p.mask.key_stride;
        with_type(p.mask.type, [&](auto type) {
          add_mask<type.value>(scores, row, first, p.mask.key_stride, p.mask_together != 0, p.kv_len - first_key);
        });
      }
      if (block + Config::kBlockN > p.kv_len || p.causal) {
        const int last = p.causal ? min(p.kv_len - 1, rows.last_key(row)) : p.kv_len - 1;
#pragma unroll
        for (int i = 0; i < Config::kRun; ++i) {
          if (first_key + i > last) scores[i / 2][row * 2 + i % 2] = -INFINITY;
        }
      }
    }

    // Probabilities, relative to the row's largest score so far.
    uint32_t probabilities[Config::kTiles][2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float of_block = -INFINITY;
#pragma unroll
      for (int i = 0; i < Config::kRun; ++i) of_block = fmaxf(of_block, scores[i / 2][row * 2 + i % 2]);
      const float before = largest[row];
      largest[row] = fmaxf(before, max_of_quad(of_block));
      const float top = largest[row] == -INFINITY ? 0.0f : largest[row];  // of a row that has seen no key yet
      const float rescale = ptx::ex2(before - top);
      const float base = top - p.level;
      sum[row] *= rescale;
      if (__any_sync(0xffffffffu, rescale != 1.0f && before != -INFINITY)) {
#pragma unroll
        for (int piece = 0; piece < Config::kPieces; ++piece) {
#pragma unroll
          for (int word = 0; word < 4; ++word) {
            out[piece][word][row * 2] *= rescale;
            out[piece][word][row * 2 + 1] *= rescale;
          }
        }
      }
#pragma unroll
      for (int tile = 0; tile < Config::kTiles; ++tile) {
        const float low = ptx::ex2(scores[tile][row * 2] - base), high = ptx::ex2(scores[tile][row * 2 + 1] - base);
        sum[row] += low + high;
        probabilities[tile][row] = Pair<Element>::pack(low, high);
      }
    }

#pragma unroll
    for (int piece = 0; piece < Config::kPieces; ++piece) {
      source.v(v, piece);
#pragma unroll
      for (int tile = 0; tile < Config::kTiles; tile += 2) {
        const uint32_t fragment[4] = {probabilities[tile][0], probabilities[tile][1], probabilities[tile + 1][0], probabilities[tile + 1][1]};
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          ptx::mma_m16n8k16_f32<Element>(out[piece][word], fragment, ptx::movmatrix_trans(v[piece][tile][word]),
                                         ptx::movmatrix_trans(v[piece][tile + 1][word]));
        }
      }
    }
  }
  source.finish();
}

}  // namespace sage
