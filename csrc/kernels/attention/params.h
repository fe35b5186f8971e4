// What every attention kernel is told.
#pragma once

#include "kernels/tensor_view.h"

namespace sage {

// A mask as the caller left it, of any strides (0 where it is broadcast), and what mask_tiles made of it.
struct AttentionMask {
  enum Type : int32_t { kBool, kHalf, kBfloat16, kFloat };  // true: seen; else a number added to the score
  // What a tile of `tile_rows` x 64 keys holds: no key that any row sees; something to be looked at; nothing that changes a score.
  // Where there are bits, kMixed means that they say it all, kAdded that something is added to some score.
  enum Tile : uint8_t { kHidden, kMixed, kVisible, kAdded };

  const void* data;      // null: there is no mask
  const uint8_t* tiles;  // [.., rows, keys], one Tile a byte
  const uint32_t* bits;  // of each tile of 64 rows: scores that are seen, as MaskTiles leaves them; null for mma.sync
  // In bytes: within a tile 32 bits then do.
  static constexpr int64_t kLargestRowStride = 1 << 27, kLargestKeyStride = 1 << 24;

  int64_t batch_stride;  // of data, in bytes
  int64_t head_stride;
  int64_t row_stride;
  int64_t key_stride;
  int64_t tiles_batch_stride;
  int64_t tiles_head_stride;
  int64_t tiles_row_stride;
  int32_t tile_rows;
  int32_t type;
};

// Kernels compute with powers of 2 and logarithms to that base: what makes of these powers and logarithms to the base e, and back.
constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453;

struct AttentionParams {
  TensorView q;
  TensorView v;
  TensorView out;
  const int8_t* k_int8;  // as QuantKInt8 leaves them
  const float* k_scale;
  const float* k_mean;   // null: K was not smoothed
  const float* q_factor;  // Q is multiplied by it, channel by channel, and rotated where `rotated` says so: QuantKInt8, whose q_unit it counts
  const int32_t* rotated;  // of each head's keys; null with k_mean
  float* lse;            // [batch, q_heads, qo_len] or, packed, [q_heads, qo_len]; natural logarithm; null: not wanted
  int32_t heads_together;  // heads of Q in a section, whose tiles are computed one beside the other
  int32_t last_heads;      // heads in the last section
  int32_t batch;         // or, packed, sequences
  int32_t q_heads;
  int32_t kv_heads;
  int32_t qo_len;        // tokens of a batch element, or of all sequences
  int32_t kv_len;
  int32_t head_dim;      // of Q and K; the kernel's own may be larger
  int32_t v_head_dim;    // of V and the output
  int32_t causal;        // query i sees keys 0..i
  float scale_log2;      // sm_scale * log2(e)
  const uint8_t* v_quantised;  // as QuantV leaves them, for kernels that take V so
  const uint8_t* v_scale;
  const float* v_mean;   // null: V was not smoothed
  const int32_t* cu_seqlens_q;  // [batch + 1]: sequences.h; null: not packed
  const int32_t* cu_seqlens_k;
  AttentionMask mask;
};

}  // namespace sage
