// Looks at an attention mask once: attention then skips the tiles that hide everything and does not read those that change nothing. For
// wgmma it also says of each key whether a row sees it, a bit, in the order in which threads hold the scores.
//
// A block of threads reads 128 rows and of each 256 bytes, 16 at a time, makes bits of them, and looks at those.
#include "kernels/mask/mask_tiles.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/attention/mask_value.cuh"

namespace sage {

constexpr int kPieceBytes = 16;
constexpr int kPieces = MaskTiles::kRowBytes / kPieceBytes;       // of a row
constexpr int kRowsAtOnce = MaskTiles::kThreads / kPieces;
constexpr int kPasses = MaskTiles::kRows / kRowsAtOnce;
constexpr int kMostTiles = MaskTiles::kRowBytes / MaskTiles::kKeys;  // of keys: of bool
constexpr int kHalves = MaskTiles::kRows / MaskTiles::kWgmmaRows;

// What a piece of a row says.
struct Seen {
  uint32_t keys;   // that are seen, a bit a key
  uint32_t added;  // not zero: to some of them something is added
};

__device__ __forceinline__ void look(Seen& seen, float value, int bit) {
  seen.keys |= (value != -INFINITY ? 1u : 0u) << bit;
  seen.added |= value != -INFINITY && value != 0.0f ? 1 : 0;
}

// 16 bytes of bool, which are what is not zero.
__device__ __forceinline__ Seen look_at_bytes(const uint32_t (&words)[4]) {
  uint32_t keys = 0;
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    const uint32_t high = ((words[i] & 0x7f7f7f7fu) + 0x7f7f7f7fu | words[i]) & 0x80808080u;
    keys = __funnelshift_l(high * 0x00204081u, keys, 4);  // the product has these four bits on top
  }
  return {keys, 0};
}

// 8 numbers of 16 bits, as mask_value takes them.
template <typename T2>
__device__ __forceinline__ Seen look_at_pairs(const uint32_t (&words)[4], uint32_t hides) {
  uint32_t keys = 0, added = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // In each half all bits or none; not of NaN.
    const uint32_t hidden = __hle2_mask(reinterpret_cast<const T2&>(words[i]), reinterpret_cast<const T2&>(hides));
    keys |= ~hidden & 0x00010001u << 2 * i;
    added |= words[i] & 0x7fff7fffu & ~hidden;
  }
  return {(keys | keys >> 15) & 0xffu, added};
}

__device__ __forceinline__ Seen look_at_vector(int type, const uint4& piece) {
  const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
  if (type == AttentionMask::kBool) return look_at_bytes(words);
  if (type == AttentionMask::kHalf) return look_at_pairs<__half2>(words, 0xfbfffbffu);                 // -65504
  if (type == AttentionMask::kBfloat16) return look_at_pairs<__nv_bfloat162>(words, 0xc8f5c8f5u);  // the next below -5e5
  Seen seen{};
#pragma unroll
  for (int i = 0; i < 4; ++i) look(seen, mask_value(__uint_as_float(words[i])), i);
  return seen;
}

// Of a row's bits each eighth pair, from this one, to each other pair of 32.
__device__ __forceinline__ uint32_t each_eighth_pair(uint2 row, int pair) {
  const auto half = [pair](uint32_t bits) {
    bits = bits >> 2 * pair & 0x03030303u;
    bits = (bits | bits >> 4) & 0x00330033u;
    return bits | bits >> 8;
  };
  return __byte_perm(half(row.x), half(row.y), 0x5410) & 0x33333333u;
}

// Bits of the first keys of a tile, this one the last.
__device__ __forceinline__ uint2 keys_up_to(int last) {
  const auto half = [](int last) { return last < 0 ? 0 : last >= 31 ? ~0u : (2u << last) - 1; };
  return make_uint2(half(last), half(last - 32));
}

extern "C" __global__ void __launch_bounds__(MaskTiles::kThreads)
    mask_tiles(const __grid_constant__ MaskTiles::Params p) {
  __shared__ uint2 rows[MaskTiles::kRows][kMostTiles + 1];  // a bit a key
  __shared__ uint32_t some[kHalves][kMostTiles], all[kHalves][kMostTiles], added[kMostTiles][kHalves];
  const int type = p.mask.type;
  const int element_size = type == AttentionMask::kBool ? 1 : type == AttentionMask::kFloat ? 4 : 2;
  const int piece_keys = kPieceBytes / element_size;
  const int tiles = MaskTiles::kRowBytes / element_size / MaskTiles::kKeys;  // of keys, of this block of threads
  const int key_tiles = (p.keys + MaskTiles::kKeys - 1) / MaskTiles::kKeys;
  const int key_blocks = (key_tiles + tiles - 1) / tiles;
  const int row_blocks = (p.rows + MaskTiles::kRows - 1) / MaskTiles::kRows;
  const int first_tile = blockIdx.x % key_blocks * tiles;
  const int first_row = blockIdx.x / key_blocks % row_blocks * MaskTiles::kRows;
  const int batch_head = blockIdx.x / key_blocks / row_blocks;
  const int piece = threadIdx.x % kPieces;
  const int key = first_tile * MaskTiles::kKeys + piece * piece_keys;
  const auto* origin = static_cast<const uint8_t*>(p.mask.data) + batch_head / p.heads * p.mask.batch_stride +
                       batch_head % p.heads * p.mask.head_stride + key * p.mask.key_stride;
  if (threadIdx.x < kHalves * kMostTiles) {
    const int half = threadIdx.x / kMostTiles, tile = threadIdx.x % kMostTiles;
    some[half][tile] = added[tile][half] = 0;
    all[half][tile] = 1;
  }
  __syncthreads();

  uint4 pieces[kPasses];
  const bool vector = p.vectors && key + piece_keys <= p.keys;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = first_row + pass * kRowsAtOnce + threadIdx.x / kPieces;
    if (vector && row < p.rows) pieces[pass] = __ldcs(reinterpret_cast<const uint4*>(origin + row * p.mask.row_stride));
  }
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int block_row = pass * kRowsAtOnce + threadIdx.x / kPieces;
    const int row = first_row + block_row;
    Seen seen{};
    if (row < p.rows) {
      if (vector) {
        seen = look_at_vector(type, pieces[pass]);
      } else {
        const auto* element = origin + row * p.mask.row_stride;
        for (int i = 0; i < piece_keys && key + i < p.keys; ++i) look(seen, mask_value(type, element + i * p.mask.key_stride), i);
      }
    }
    auto* bytes = reinterpret_cast<uint8_t*>(rows[block_row]);
    if (element_size == 1) {
      reinterpret_cast<uint16_t*>(bytes)[piece] = static_cast<uint16_t>(seen.keys);
    } else if (element_size == 2) {
      bytes[piece] = static_cast<uint8_t>(seen.keys);
    } else {
      const uint32_t other = __shfl_xor_sync(0xffffffffu, seen.keys, 1);
      if (piece % 2 == 0) bytes[piece / 2] = static_cast<uint8_t>(seen.keys | other << 4);
    }
    if (seen.added) added[piece * piece_keys / MaskTiles::kKeys][block_row / MaskTiles::kWgmmaRows] = 1;
  }
  __syncthreads();

  // A warpgroup looks at 64 rows: a warp at 16 of them, a lane at two.
  const int half = threadIdx.x / 128, lane = threadIdx.x % 32;
  uint32_t words[kMostTiles];
#pragma unroll
  for (int tile = 0; tile < kMostTiles; ++tile) {
    words[tile] = 0;
    if (tile >= tiles) continue;
    const int tile_key = (first_tile + tile) * MaskTiles::kKeys;
    // Keys past the last are hidden: to wgmma's bits no tile with such is seen as a whole.
    const uint2 whole = p.bits != nullptr ? make_uint2(~0u, ~0u) : keys_up_to(p.keys - 1 - tile_key);
    bool every = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int block_row = threadIdx.x / 32 * 16 + lane / 4 + i * 8;
      const int row = first_row + block_row;
      uint2 bits = rows[p.rows == 1 ? 0 : block_row][tile];
      if (p.causal) {
        const uint2 sees = keys_up_to(row - tile_key);
        bits = make_uint2(bits.x & sees.x, bits.y & sees.y);
      }
      // Rows past the last say nothing.
      every = every && (bits.x == whole.x && bits.y == whole.y || row >= p.rows && p.rows > 1);
      words[tile] |= each_eighth_pair(bits, lane % 4) << i * 2;
    }
    if (__any_sync(0xffffffffu, words[tile] != 0) && lane == 0) some[half][tile] = 1;
    if (!__all_sync(0xffffffffu, every) && lane == 0) all[half][tile] = 0;
  }
  __syncthreads();

  const int tile_rows = p.mask.tile_rows;
  const int row_tiles = (p.rows + tile_rows - 1) / tile_rows;
  const int row_tile = first_row / tile_rows + (p.bits != nullptr ? half : 0);
  if (row_tile >= row_tiles) return;
  const int64_t index = (static_cast<int64_t>(batch_head) * row_tiles + row_tile) * key_tiles + first_tile;
#pragma unroll
  for (int tile = 0; tile < kMostTiles; ++tile) {
    if (tile >= tiles || first_tile + tile >= key_tiles) break;
    uint8_t state;
    if (p.bits != nullptr) {
      state = !some[half][tile]                     ? AttentionMask::kHidden
              : added[tile][p.rows == 1 ? 0 : half] ? AttentionMask::kAdded
              : all[half][tile]                     ? AttentionMask::kVisible
                                                    : AttentionMask::kMixed;
      if (state == AttentionMask::kMixed || state == AttentionMask::kAdded) {
        p.bits[(index + tile) * MaskTiles::kWords + threadIdx.x % 128] = words[tile];
      }
      if (threadIdx.x % 128 == 0) p.tiles[index + tile] = state;
    } else if (threadIdx.x == 0) {
      state = !some[0][tile] && !some[1][tile]                                        ? AttentionMask::kHidden
              : all[0][tile] && all[1][tile] && !added[tile][0] && !added[tile][1] ? AttentionMask::kVisible
                                                                                     : AttentionMask::kMixed;
      p.tiles[index + tile] = state;
    }
  }
}

}  // namespace sage
