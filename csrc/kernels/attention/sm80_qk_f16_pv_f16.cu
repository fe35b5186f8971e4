// Attention of few tokens in 16 bits, float32 sums (sm_80 on): what quantising would save there is less than it takes.
//
// A warp computes 16 rows of the output, all in registers: it shares nothing, and waits for no other warp. Products may add up channels, and
// keys, in any order. So where a fragment has pairs that lie apart, a lane takes eight neighbouring channels, and reads and writes 16 bytes at
// once; and of a block's keys it takes neighbours too, whose mask lies together.
#include "kernels/attention/sm80_qk_f16_pv_f16.h"

#include <cuda/std/type_traits>

#include "kernels/attention/mask_value.cuh"
#include "kernels/attention/quad.cuh"
#include "kernels/element.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/mma_sync.cuh"
#include "kernels/ptx/movmatrix.cuh"

namespace sage {

struct Config : Sm80QkF16PvF16 {
  using Element = SAGE_DTYPE;
  static constexpr int kPieces = SAGE_HEAD_DIM / 32;  // of eight channels: a lane's of a row, which four lanes share
  static constexpr int kTiles = 2;                    // of eight keys: what a block holds
  static constexpr int kRun = 2 * kTiles;             // neighbouring keys of a block whose scores a lane has
  static constexpr int kBlockN = 8 * kTiles;
  // What a row's probabilities are at its largest score, as a power of two: so many keys' products with bfloat16's largest numbers are numbers.
  static constexpr float kLevel = cuda::std::is_same_v<Element, __half> ? 0.0f : -7.0f;
  static_assert(most_keys(SAGE_HEAD_DIM) <= 1 << 7);
  static constexpr int kBlocksPerSm = SAGE_HEAD_DIM <= 64 ? 4 : SAGE_HEAD_DIM <= 128 ? 2 : 1;
  // Whether registers hold Q, and K and V of a block that are on their way; else 32 channels of each in turn.
  static constexpr bool kAhead = SAGE_HEAD_DIM <= 128;
};

// Eight channels of a row of a head; zeros where there is no such row, or channel.
__device__ __forceinline__ void load_piece(uint32_t (&words)[4], const TensorView& tensor, const Config::Element* head, int row, int rows,
                                           int piece, int head_dim) {
  load_channels<8>(words, head + row * tensor.token_stride, piece * 32 + threadIdx.x % 4 * 8, row < rows ? head_dim : 0, true);
}

// K or V of a block: [piece][tile][word], of the keys that stand in a lane's rows of fragments.
using Block = uint32_t[Config::kPieces][Config::kTiles][4];

__device__ __forceinline__ void load_keys(uint32_t (&words)[Config::kTiles][4], const TensorView& tensor, const Config::Element* head, int block,
                                          int keys, int piece, int head_dim) {
  const int column = threadIdx.x % 32 / 4;
#pragma unroll
  for (int tile = 0; tile < Config::kTiles; ++tile) {
    load_piece(words[tile], tensor, head, block + column / 2 * Config::kRun + tile * 2 + column % 2, keys, piece, head_dim);
  }
}

__device__ __forceinline__ void load_block(Block& words, const TensorView& tensor, const Config::Element* head, int block, int keys, int head_dim) {
#pragma unroll
  for (int piece = 0; piece < Config::kPieces; ++piece) load_keys(words[piece], tensor, head, block, keys, piece, head_dim);
}

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

// What a warp computes. Strips are numbered through the rows of a head, then the heads, which may lie next to each other, then the batch.
struct Strip {
  int batch, head, kv_head, first_row;
  int64_t lse;  // where its head's begins

  __device__ __forceinline__ Strip(const Config::Params& p, int none) {
    const int index = static_cast<int>(blockIdx.x) * Config::kWarps + threadIdx.x / 32 + none;
    const int of_head = (p.qo_len + Config::kWarpM - 1) / Config::kWarpM;
    const int batch_head = index / of_head;
    batch = batch_head / p.q_heads;
    head = batch_head % p.q_heads;
    kv_head = head / (p.q_heads / p.kv_heads);
    first_row = index % of_head * Config::kWarpM;
    lse = int64_t{batch_head} * p.qo_len;
  }
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm) sm80_qk_f16_pv_f16(const __grid_constant__ Config::Params p) {
  using Element = Config::Element;
  const int lane = threadIdx.x % 32;
  const Strip strip(p, 0);
  const int batch = strip.batch, head = strip.head, kv_head = strip.kv_head, first_row = strip.first_row;
  if (batch >= p.batch) return;
  const int rows[2] = {first_row + lane / 4, first_row + lane / 4 + 8};
  const auto* q_head = row_pointer<Element>(p.q, batch, head, 0);
  const auto* k_head = row_pointer<Element>(p.k, batch, kv_head, 0);
  const auto* v_head = row_pointer<Element>(p.v, batch, kv_head, 0);

  uint32_t q[Config::kPieces][2][4];
  const auto load_q = [&](int piece, int first) {
#pragma unroll
    for (int row = 0; row < 2; ++row) load_piece(q[piece][row], p.q, q_head, first + row * 8, p.qo_len, piece, p.head_dim);
  };
  if constexpr (Config::kAhead) {
#pragma unroll
    for (int piece = 0; piece < Config::kPieces; ++piece) load_q(piece, rows[0]);
  }
  Block k, v;
  if constexpr (Config::kAhead) load_block(k, p.k, k_head, 0, p.kv_len, p.head_dim);

  float out[Config::kPieces][4][4] = {};
  float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  const int keys = p.causal ? min(p.kv_len, first_row + Config::kWarpM) : p.kv_len;
#pragma unroll 1
  for (int block = 0; block < keys; block += Config::kBlockN) {
    if constexpr (Config::kAhead) load_block(v, p.v, v_head, block, p.kv_len, p.v_head_dim);

    Scores scores = {};
#pragma unroll
    for (int piece = 0; piece < Config::kPieces; ++piece) {
      if constexpr (!Config::kAhead) {
        int first = rows[0];
        ptx::keep(first);  // as if it were another each time: else Q is kept, for which registers are short
        load_q(piece, first);
        load_keys(k[piece], p.k, k_head, block, p.kv_len, piece, p.head_dim);
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
    if (Config::kAhead && block + Config::kBlockN < keys) load_block(k, p.k, k_head, block + Config::kBlockN, p.kv_len, p.head_dim);

    // In log2 units; what is not seen becomes -infinity.
    const int first_key = block + lane % 4 * Config::kRun;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int i = 0; i < Config::kRun; ++i) scores[i / 2][row * 2 + i % 2] *= p.scale_log2;
      if (p.mask.data != nullptr) {
        const auto* first = static_cast<const uint8_t*>(p.mask.data) + batch * p.mask.batch_stride + head * p.mask.head_stride +
                            min(rows[row], p.qo_len - 1) * p.mask.row_stride + first_key * p.mask.key_stride;
        with_type(p.mask.type, [&](auto type) {
          add_mask<type.value>(scores, row, first, p.mask.key_stride, p.mask_together != 0, p.kv_len - first_key);
        });
      }
      if (block + Config::kBlockN > p.kv_len || p.causal) {
        const int last = p.causal ? min(p.kv_len - 1, rows[row]) : p.kv_len - 1;
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
      const float reference = largest[row] == -INFINITY ? 0.0f : largest[row];  // of a row that has seen no key yet
      const float rescale = ptx::ex2(before - reference);
      const float base = reference - Config::kLevel;
      sum[row] *= rescale;
      if (__any_sync(0xffffffffu, rescale != 1.0f) && block > 0) {
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
      if constexpr (!Config::kAhead) load_keys(v[piece], p.v, v_head, block, p.kv_len, piece, p.v_head_dim);
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

  int none = 0;
  ptx::keep(none);  // so that it is found anew, and takes no registers meanwhile
  const Strip last(p, none);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float total = sum_of_quad(sum[row]);
    const int token = last.first_row + lane / 4 + row * 8;
    if (token >= p.qo_len) continue;
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;  // a row that sees no key is zero
    auto* to = const_cast<Element*>(row_pointer<Element>(p.out, last.batch, last.head, token)) + lane % 4 * 8;
#pragma unroll
    for (int piece = 0; piece < Config::kPieces; ++piece) {
      uint32_t words[4];
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        words[word] = Pair<Element>::pack(out[piece][word][row * 2] * inverse, out[piece][word][row * 2 + 1] * inverse);
      }
      if (piece * 32 + lane % 4 * 8 < p.v_head_dim) {
        *reinterpret_cast<uint4*>(to + piece * 32) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
    if (p.lse != nullptr && lane % 4 == 0) {
      constexpr float kLn2 = 0.6931471805599453f;
      p.lse[last.lse + token] = total == 0.0f ? -INFINITY : (largest[row] - Config::kLevel + ptx::lg2(total)) * kLn2;
    }
  }
}

}  // namespace sage
