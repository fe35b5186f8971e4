// Which tile of the output a block of threads computes, from which keys.
#pragma once

#include "kernels/attention/params.h"
#include "kernels/ptx/cluster.cuh"
#include "kernels/quant/quant_k_int8.h"
#include "kernels/sequences.cuh"

namespace sage {

struct Tile {
  int batch;           // of the tensors: 0 where sequences are packed
  int head;
  int kv_head;
  int first_row;       // of the batch element or sequence
  int qo_len;
  int kv_len;
  int full_blocks;     // of 64 keys: in those before it every row sees every key
  int blocks;          // and from this one on none sees any
  int64_t q_token;     // where the sequence starts
  int64_t kv_token;
  int64_t lse;         // index of its first row
  int64_t kv_mean;     // index of its means of K and of V
  int64_t kv_block;    // index of its first block of 64 keys, quantised
  const uint8_t* mask_tiles;  // of these rows

  // By a whole warp, where sequences are packed. qo_len is 0 where there is nothing to do.
  __device__ __forceinline__ Tile(const AttentionParams& p, int block_m, int index)
      : Tile(p, block_m, (p.qo_len + block_m - 1) / block_m, index, [&p] { return p.cu_seqlens_q != nullptr; }) {}
  // The same for who knows whether sequences are `packed` before. A head has `q_blocks` of `block_m` rows where they are not. Where they are, and one ends with no
  // more than `rows_alone`, each block of a pair has these of a head of its own: the second those of the head behind.
  template <typename Packed>
  __device__ __forceinline__ Tile(const AttentionParams& p, int block_m, int q_blocks, int index, const Packed& packed, int rows_alone = 0,
                                  bool first_rows_first = false)
      : q_token(0), kv_token(0) {
    int sequence;
    if (!packed()) {
      // Tiles are numbered through the heads whose K and V stay in the L2 cache together, then the blocks of rows, last rows
      // first as a rule, then the next such heads. Under a causal mask the last rows see most keys: short tiles then fill the tail.
      const int first_last = p.batch * p.q_heads - p.last_heads;
      const int first_head = min(index / (p.heads_together * q_blocks) * p.heads_together, first_last);
      const int in_section = index - first_head * q_blocks;
      const int heads = first_head == first_last ? p.last_heads : p.heads_together;
      const int batch_head = first_head + in_section % heads;
      first_row = (first_rows_first ? in_section / heads : q_blocks - 1 - in_section / heads) * block_m;
      batch = sequence = batch_head / p.q_heads;
      head = batch_head % p.q_heads;
      qo_len = p.qo_len;
      kv_len = p.kv_len;
      lse = static_cast<int64_t>(batch_head) * p.qo_len;
    } else {
      const int all_slots = static_cast<int>(slots(p.qo_len, p.batch + 1, block_m));
      const int slot = index % all_slots;
      const Sequence queries = find_sequence(p.cu_seqlens_q, p.batch, p.qo_len, block_m, slot);
      const Sequence keys = sequence_at(p.cu_seqlens_k, p.batch, p.kv_len, QuantKInt8::kSpanN, queries.index);
      batch = 0;
      sequence = max(0, min(queries.index, p.batch - 1));
      head = index / all_slots;
      const int tiles = (queries.length + block_m - 1) / block_m;
      const int tile = slot - queries.first_slot;
      qo_len = tile < tiles ? queries.length : 0;
      first_row = (tiles - 1 - tile) * block_m;
      if (rows_alone > 0 && ends_within(rows_alone)) {
        if (head % 2 == 1) qo_len = 0;  // the tile of the head before has them
        head += ptx::cluster_rank();
      }
      kv_len = queries.index >= p.batch ? 0 : p.causal ? min(keys.length, queries.length) : keys.length;
      q_token = queries.first_token;
      kv_token = keys.first_token;
      lse = static_cast<int64_t>(head) * p.qo_len + queries.first_token;
      kv_block = keys.first_slot * (QuantKInt8::kSpanN / QuantKInt8::kBlockN);
    }
    kv_head = head / (p.q_heads / p.kv_heads);
    kv_mean = static_cast<int64_t>(sequence) * p.kv_heads + kv_head;
    if (!packed()) {
      kv_block = kv_mean * QuantKInt8::blocks(p.kv_len);
    } else if (kv_len == 0) {
      kv_block = 0;  // of which there need be no more
    } else {
      kv_block += kv_head * slots(p.kv_len, p.batch, QuantKInt8::kSpanN) * (QuantKInt8::kSpanN / QuantKInt8::kBlockN);
    }
    constexpr int kBlockN = QuantKInt8::kBlockN;
    full_blocks = (p.causal ? min(kv_len, first_row + 1) : kv_len) / kBlockN;
    blocks = ((p.causal ? min(kv_len, first_row + block_m) : kv_len) + kBlockN - 1) / kBlockN;
    mask_tiles = p.mask.data == nullptr ? nullptr
                                        : p.mask.tiles + batch * p.mask.tiles_batch_stride + head * p.mask.tiles_head_stride +
                                              first_row / p.mask.tile_rows * p.mask.tiles_row_stride;
  }

  // Whether the sequence has no more rows than so many from the tile's first on.
  __device__ __forceinline__ bool ends_within(int rows) const { return qo_len - first_row <= rows; }
};

}  // namespace sage
