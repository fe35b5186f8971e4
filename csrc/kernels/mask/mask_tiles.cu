// Looks at an attention mask once: attention then skips the tiles that hide everything and does not read those that change nothing. For
// wgmma it also says of each key whether a row sees it, a bit, in the order in which threads hold the scores.
//
// A block of threads reads 128 rows and of each 256 bytes, 16 at a time, makes bits of them, and looks at those.
#include "kernels/mask/mask_tiles.h"

#include "kernels/attention/mask_value.cuh"

namespace sage {

constexpr int kPieceBytes = 16;
constexpr int kPieces = MaskTiles::kRowBytes / kPieceBytes;       // of a row
constexpr int kRowsAtOnce = MaskTiles::kThreads / kPieces;
constexpr int kPasses = MaskTiles::kRows / kRowsAtOnce;
constexpr int kMostTiles = MaskTiles::kRowBytes / MaskTiles::kKeys;  // of keys: of bool
constexpr int kHalves = MaskTiles::kRows / MaskTiles::kWgmmaRows;

// What a piece of a row says, a bit a key.
struct Seen {
  uint32_t keys = 0;   // that are seen
  bool added = false;  // to some of them something is added
};

__device__ __forceinline__ uint32_t nonzero_bytes(uint32_t word) {
  const uint32_t high = ((word & 0x7f7f7f7fu) + 0x7f7f7f7fu | word) >> 7 & 0x01010101u;
  return high * 0x01020408u >> 24 & 0xfu;
}

__device__ __forceinline__ void look(Seen& seen, int type, const void* element, int bit) {
  const float value = mask_value(type, static_cast<const uint8_t*>(element));
  seen.keys |= (value != -INFINITY ? 1u : 0u) << bit;
  seen.added |= value != -INFINITY && value != 0.0f;
}

// 16 bytes, of a mask whose elements lie one after the other.
__device__ __forceinline__ Seen look_at_vector(int type, const uint4& piece) {
  Seen seen;
  if (type == AttentionMask::kBool) {
    seen.keys = nonzero_bytes(piece.x) | nonzero_bytes(piece.y) << 4 | nonzero_bytes(piece.z) << 8 | nonzero_bytes(piece.w) << 12;
  } else if (type == AttentionMask::kFloat) {
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) look(seen, AttentionMask::kFloat, &words[i], i);
  } else {
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint16_t element = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
      look(seen, type, &element, i);
    }
  }
  return seen;
}

// Every eighth pair of a row's bits, from the low end, to every other pair of 32.
__device__ __forceinline__ uint32_t every_eighth_pair(uint64_t bits) {
  bits &= 0x0303030303030303u;
  bits = (bits | bits >> 4) & 0x0033003300330033u;
  bits = (bits | bits >> 8) & 0x0000333300003333u;
  return static_cast<uint32_t>(bits | bits >> 16);
}

extern "C" __global__ void __launch_bounds__(MaskTiles::kThreads)
    mask_tiles(const __grid_constant__ MaskTiles::Params p) {
  __shared__ uint64_t rows[MaskTiles::kRows][kMostTiles + 1];  // a bit a key
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
    Seen seen;
    if (row < p.rows) {
      if (vector) {
        seen = look_at_vector(type, pieces[pass]);
      } else {
        const auto* element = origin + row * p.mask.row_stride;
        for (int i = 0; i < piece_keys && key + i < p.keys; ++i) look(seen, type, element + i * p.mask.key_stride, i);
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
    bool every = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int block_row = threadIdx.x / 32 * 16 + lane / 4 + i * 8;
      const int row = first_row + block_row;
      uint64_t bits = rows[p.rows == 1 ? 0 : block_row][tile];
      if (p.causal) {
        const int past = row - tile_key;  // the last key that the row sees
        bits &= past < 0 ? 0 : past >= 63 ? ~uint64_t{0} : (uint64_t{2} << past) - 1;
      }
      // Rows past the last say nothing, keys past the last are hidden: a tile with such is never seen as a whole by wgmma's bits.
      const int keys_left = p.keys - tile_key;
      const uint64_t whole = p.bits != nullptr || keys_left >= 64 ? ~uint64_t{0} : (uint64_t{1} << max(0, keys_left)) - 1;
      every = every && (bits == whole || (row >= p.rows && p.rows > 1));
      words[tile] |= every_eighth_pair(bits >> lane % 4 * 2) << i * 2;
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
