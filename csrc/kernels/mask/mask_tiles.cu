// Looks at an attention mask once: attention then skips the tiles that hide everything and does not read those that change nothing. For
// wgmma it also says of each key whether a row sees it, a bit, in the order in which threads hold the scores.
//
// A warp looks at one tile and waits for no other warp. It reads 64 rows (128 for mma.sync, which wants no bits) in slabs of 16, as accumulators lie: of a
// slab a lane reads two rows, lane / 4 and 8 further, and of each every fourth 16 bytes, 16 keys in all. Of these 32 numbers it makes 32
// bits, and four lanes, which have the same rows, exchange theirs so that each has the keys whose scores it will hold.
#include "kernels/mask/mask_tiles.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cuda/std/type_traits>

#include "kernels/attention/mask_value.cuh"
#include "kernels/ptx/grid.cuh"

namespace sage {

constexpr int kPieceBytes = 16;
constexpr int kPieces = 8;  // of a lane, on their way together
constexpr int kSlabs = MaskTiles::kWgmmaRows / 16;

// An element as it lies in memory.
template <int kType>
using Element = cuda::std::conditional_t<kType == AttentionMask::kBool, uint8_t,
                                         cuda::std::conditional_t<kType == AttentionMask::kFloat, uint32_t, uint16_t>>;

// Makes it the last one, and the first one go.
template <typename T, int kSize>
__device__ __forceinline__ void append(T (&values)[kSize], const T& value) {
#pragma unroll
  for (int i = 0; i < kSize - 1; ++i) values[i] = values[i + 1];
  values[kSize - 1] = value;
}

// Bytes of bool become 0 or 1, as PyTorch leaves them.
__device__ __forceinline__ void make_ones(uint4 (&pieces)[kPieces]) {
  uint32_t any = 0;
#pragma unroll
  for (const uint4& piece : pieces) any |= piece.x | piece.y | piece.z | piece.w;
  if (!__any_sync(0xffffffffu, (any & ~0x01010101u) != 0)) return;
  const auto ones = [](uint32_t x) { return ((x & 0x7f7f7f7fu) + 0x7f7f7f7fu | x) >> 7 & 0x01010101u; };
#pragma unroll
  for (uint4& piece : pieces) piece = make_uint4(ones(piece.x), ones(piece.y), ones(piece.z), ones(piece.w));
}

// Which keys of two rows are seen. Byte n is for lane n of four: two bits are two keys of the first eight in the first row, two the same in the second
// row, and four those of the next eight.
__device__ __forceinline__ uint32_t look_at_bytes(const uint4& first, const uint4& second) {
  const uint32_t low = first.x + second.x * 4 + first.z * 16 + second.z * 64;
  const uint32_t high = first.y + second.y * 4 + first.w * 16 + second.w * 64;
  return __byte_perm(low, high, 0x6420) + __byte_perm(low, high, 0x7531) * 2;
}

// The same of eight keys, four bits for each lane. To `added` come the bits of what is seen.
template <typename T2>
__device__ __forceinline__ uint32_t look_at_pairs(const uint4& first, const uint4& second, uint32_t hides, uint32_t& added) {
  const uint32_t words[2][4] = {{first.x, first.y, first.z, first.w}, {second.x, second.y, second.z, second.w}};
  hides |= hides << 16;
  uint32_t keys = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t word = words[i % 2][i / 2];
    // In each half all bits or none; not of NaN.
    const uint32_t hidden = __hle2_mask(reinterpret_cast<const T2&>(word), reinterpret_cast<const T2&>(hides));
    keys |= ~hidden & 0x00010001u << 2 * i;
    added |= word & ~hidden;
  }
  return keys | keys >> 15;
}

// The same of a piece of each row, in any order.
__device__ __forceinline__ uint32_t look_at_floats(const uint4& first, const uint4& second, uint32_t hides, uint32_t& added) {
  const uint32_t words[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
  uint32_t keys = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool hidden = __uint_as_float(words[i]) <= __uint_as_float(hides);
    keys |= hidden ? 0 : 1u << i;
    added |= hidden ? 0 : words[i];
  }
  return keys;
}

// What lanes have of their own keys becomes what each has of those whose scores it will hold: four bits of each eight keys.
__device__ __forceinline__ uint32_t exchange_bytes(uint32_t seen) {
  const int lane = threadIdx.x % 4;
  seen = __byte_perm(seen, __shfl_xor_sync(0xffffffffu, seen, 2), lane / 2 == 0 ? 0x5410 : 0x3276);
  return __byte_perm(seen, __shfl_xor_sync(0xffffffffu, seen, 1), lane % 2 == 0 ? 0x6240 : 0x3715);
}
__device__ __forceinline__ uint32_t exchange_halves_of_bytes(uint32_t seen) {
  const int lane = threadIdx.x % 4;
  seen = __byte_perm(seen, __shfl_xor_sync(0xffffffffu, seen, 2), lane / 2 == 0 ? 0x6240 : 0x3715);
  const uint32_t other = __shfl_xor_sync(0xffffffffu, seen, 1);
  return lane % 2 == 0 ? seen & 0x0f0f0f0fu | other << 4 & 0xf0f0f0f0u : seen & 0xf0f0f0f0u | other >> 4 & 0x0f0f0f0fu;
}

// The keys of a slab that rows see, as words of bits have them; of float32, of which nobody wants bits, in any order.
template <int kType>
__device__ __forceinline__ uint32_t look_at(const uint4* first, const uint4* second, uint32_t& added) {
  if constexpr (kType == AttentionMask::kBool) {
    return exchange_bytes(look_at_bytes(first[0], second[0]));
  } else if constexpr (kType == AttentionMask::kFloat) {
    uint32_t seen = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) seen |= look_at_floats(first[i], second[i], kHides<kType>, added) << i * 8;
    return seen;
  } else {
    using T2 = cuda::std::conditional_t<kType == AttentionMask::kHalf, __half2, __nv_bfloat162>;
    const uint32_t low = look_at_pairs<T2>(first[0], second[0], kHides<kType>, added);
    const uint32_t high = look_at_pairs<T2>(first[1], second[1], kHides<kType>, added);
    return exchange_halves_of_bytes(__byte_perm(low, high, 0x5410));
  }
}

// From the keys that each lane's rows see, as look_at leaves them, to those that any row sees: lanes 0 to 3 have SeenKeys' words.
template <int kType>
__device__ __forceinline__ uint32_t seen_by_tile(uint32_t keys) {
#pragma unroll
  for (int lanes = 16; lanes >= 4; lanes /= 2) keys |= __shfl_xor_sync(0xffffffffu, keys, lanes);
  if constexpr (kType == AttentionMask::kFloat) {  // of each 16 keys a lane has four neighbouring ones, the word two and those eight further
    const int lane = threadIdx.x % 4;
    keys |= keys >> 4;
    const uint32_t low = __shfl_sync(0xffffffffu, keys, lane / 2), high = __shfl_sync(0xffffffffu, keys, lane / 2 + 2);
    return low >> lane % 2 * 2 & 0x03030303u | (high >> lane % 2 * 2 & 0x03030303u) << 4;
  } else {
    return (keys | keys >> 2) & 0x33333333u;
  }
}

// This lane's bits, for one row, of the tile's keys 0 to `last`.
__device__ __forceinline__ uint32_t keys_up_to(int last) {
  const auto eights = [](int last) { return last < 0 ? 0 : last >= 7 ? ~0u : (16u << 4 * last) - 1; };
  last -= threadIdx.x % 4 * 2;
  return eights(last >> 3) & 0x11111111u | eights(last - 1 >> 3) & 0x22222222u;
}

template <int kType>
__device__ __forceinline__ uint4 hidden_piece() {
  constexpr uint32_t kWord = sizeof(Element<kType>) == 2 ? kHides<kType> * 0x00010001u : kHides<kType>;
  return make_uint4(kWord, kWord, kWord, kWord);
}

// 16 bytes of a row, one element after the other. It has so many from here on: what is past them hides.
template <int kType>
__device__ __forceinline__ uint4 read_elements(const uint8_t* piece, int key_stride, int keys) {
  constexpr int kOfWord = 4 / sizeof(Element<kType>);
  uint32_t words[4] = {};
#pragma unroll(2 * sizeof(Element<kType>))
  for (int i = 0; i < 4; ++i) {
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < kOfWord; ++j) {
      const int key = i * kOfWord + j;
      const uint32_t element = key < keys ? *reinterpret_cast<const Element<kType>*>(piece + key * key_stride) : kHides<kType>;
      word |= element << j * (32 / kOfWord);
    }
    append(words, word);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// The state of a tile of so many rows and keys, `seen` of whose scores are seen. Beside bits, keys past the last count as hidden: no tile with such is
// kVisible.
__device__ __forceinline__ uint8_t state_of(const MaskTiles::Params& p, uint32_t seen, int rows, int keys, bool adds) {
  const int all = rows * (p.bits != nullptr ? MaskTiles::kKeys : min(keys, MaskTiles::kKeys));
  return seen == 0                     ? AttentionMask::kHidden
         : adds && p.bits != nullptr   ? AttentionMask::kAdded
         : !adds && seen == all        ? AttentionMask::kVisible
                                       : AttentionMask::kMixed;
}

// Writes the state of a tile and, where attention asks for them, the bits that this lane has.
__device__ __forceinline__ void write(const MaskTiles::Params& p, uint32_t tile, uint8_t state, const uint32_t (&words)[kSlabs]) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) p.tiles[tile] = state;
  if (p.bits == nullptr || (state != AttentionMask::kMixed && state != AttentionMask::kAdded)) return;
#pragma unroll
  for (int j = 0; j < kSlabs; ++j) p.bits[static_cast<int64_t>(tile) * MaskTiles::kWords + j * 32 + lane] = words[j];
}

template <int kType>
__device__ __forceinline__ void look_at_tile(const MaskTiles::Params& p) {
  constexpr int kElement = sizeof(Element<kType>);
  constexpr int kPieceKeys = kPieceBytes / kElement;
  constexpr int kRowsAtOnce = kPieces / kElement * 8;
  const int tile_rows = p.mask.tile_rows;
  const int rows = p.rows;
  const int64_t row_stride = p.mask.row_stride;
  const uint32_t row_tiles = (p.rows + tile_rows - 1) / tile_rows, key_tiles = (p.keys + MaskTiles::kKeys - 1) / MaskTiles::kKeys;
  const uint32_t heads = p.heads;
  const int lane = threadIdx.x % 32;
  const uint32_t tile = blockIdx.x * MaskTiles::kTilesOfBlock + threadIdx.x / 32;
  if (tile >= p.count) return;
  const uint32_t row_tile = tile / key_tiles, batch_head = row_tile / row_tiles, batch = batch_head / heads;
  const int tile_row = (row_tile - batch_head * row_tiles) * tile_rows;
  const int tile_key = (tile - row_tile * key_tiles) * MaskTiles::kKeys;
  const int keys_left = p.keys - tile_key;
  const auto* origin = static_cast<const uint8_t*>(p.mask.data) + batch * p.mask.batch_stride +
                       (batch_head - batch * heads) * p.mask.head_stride + (tile_row + lane / 4) * row_stride +
                       (tile_key + lane % 4 * kPieceKeys) * p.mask.key_stride;

  uint32_t words[kSlabs] = {}, added = 0, count = 0, seen = 0;
#pragma unroll 1
  for (int first_row = tile_row; first_row < tile_row + tile_rows; first_row += kRowsAtOnce) {
    uint4 pieces[kPieces];  // of each eighth row first those of its keys
    // Keys from a piece on, if its row is there.
    const auto keys_from = [&](int j) {
      const int row = first_row + lane / 4 + j / kElement * 8, key = (j % kElement * 4 + lane % 4) * kPieceKeys;
      return row < rows ? keys_left - key : 0;
    };
    const auto vector = [&](int j) { return reinterpret_cast<const uint4*>(origin + j / kElement * 8 * row_stride) + j % kElement * 4; };
    if (p.vectors && keys_left >= MaskTiles::kKeys && first_row + kRowsAtOnce <= rows) {
#pragma unroll
      for (int j = 0; j < kPieces; ++j) pieces[j] = __ldcs(vector(j));
    } else if (p.vectors && (keys_left >= MaskTiles::kKeys || p.keys % kPieceKeys == 0)) {
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        pieces[j] = hidden_piece<kType>();
        if (keys_from(j) > 0) pieces[j] = __ldcs(vector(j));
      }
    } else {
#pragma unroll 1
      for (int j = 0; j < kPieces; ++j) {
        const auto* piece = origin + j / kElement * 8 * row_stride + j % kElement * 4 * kPieceKeys * p.mask.key_stride;
        append(pieces, read_elements<kType>(piece, static_cast<int>(p.mask.key_stride), keys_from(j)));
      }
    }
    origin += kRowsAtOnce * row_stride;
    if constexpr (kType == AttentionMask::kBool) make_ones(pieces);
#pragma unroll
    for (int j = 0; j < kPieces; j += 2 * kElement) {
      append(words, look_at<kType>(pieces + j, pieces + j + kElement, added));
      count += __popc(words[kSlabs - 1]);
      seen |= words[kSlabs - 1];
    }
  }
  seen = seen_by_tile<kType>(seen);
  if (lane < SeenKeys::kWords) p.seen[static_cast<int64_t>(tile) * SeenKeys::kWords + lane] = seen;
  if (p.causal && tile_row < tile_key + MaskTiles::kKeys) {
    count = 0;
#pragma unroll 1
    for (int last = tile_row + lane / 4 - tile_key, j = 0; j < kSlabs; ++j, last += 16) {
      append(words, words[0] & (keys_up_to(last) | keys_up_to(last + 8) << 2));
      count += __popc(words[kSlabs - 1]);
    }
  }
  count = __reduce_add_sync(0xffffffffu, count);
  const bool adds = __any_sync(0xffffffffu, (added & (kElement == 4 ? 0x7fffffffu : 0x7fff7fffu)) != 0);  // zeros have signs

  write(p, tile, state_of(p, count, min(rows - tile_row, tile_rows), keys_left, adds), words);
}

// The same where one row stands for all. A lane has two neighbouring keys. Nothing else hiding keys from these rows (`alone`), those that are
// far hide where others are near: padding is often told by -10000, which is no weight beside 0.
__device__ __forceinline__ void look_at_keys(const MaskTiles::Params& p) {
  const float far = mask_value(-8192.0f), near = mask_value(-1024.0f);
  const uint32_t key_tiles = (p.keys + MaskTiles::kKeys - 1) / MaskTiles::kKeys, heads = p.heads;
  const int lane = threadIdx.x % 32;
  const uint32_t tile = blockIdx.x * MaskTiles::kTilesOfBlock + threadIdx.x / 32;
  if (tile >= p.count) return;
  const uint32_t batch_head = tile / key_tiles, batch = batch_head / heads;
  const int tile_key = (tile - batch_head * key_tiles) * MaskTiles::kKeys;
  const auto* row = mask_row(p.mask, batch, batch_head - batch * heads, 0);
  const auto value = [&](int key) { return key < p.keys ? mask_value(p.mask.type, row + key * p.mask.key_stride) : -INFINITY; };
  const float values[2] = {value(tile_key + lane * 2), value(tile_key + lane * 2 + 1)};

  bool any_near = __any_sync(0xffffffffu, values[0] > near || values[1] > near);
  if (p.alone && p.mask.type != AttentionMask::kBool) {
#pragma unroll 1
    for (int first = 0; !any_near && first < p.keys; first += 32) any_near = __any_sync(0xffffffffu, value(first + lane) > near);
  }
  const float hides = p.alone && any_near ? far : -INFINITY;
  const bool seen[2] = {!(values[0] <= hides), !(values[1] <= hides)};
  const uint32_t even = __ballot_sync(0xffffffffu, seen[0]), odd = __ballot_sync(0xffffffffu, seen[1]);
  const uint32_t word = (even >> lane % 4 & 0x11111111u) | (odd >> lane % 4 & 0x11111111u) << 1;
  if (lane < SeenKeys::kWords) p.seen[static_cast<int64_t>(tile) * SeenKeys::kWords + lane] = word;

  const bool adds = __any_sync(0xffffffffu, (seen[0] && values[0] != 0.0f) || (seen[1] && values[1] != 0.0f));
  const int count = __popc(even) + __popc(odd);
  const uint32_t both = word | word << 2;  // rows of a fragment, lane / 4 and 8 further
  write(p, tile, state_of(p, count, 1, p.keys - tile_key, adds), {both, both, both, both});
}

extern "C" __global__ void __launch_bounds__(MaskTiles::kThreads, __CUDA_ARCH__ / 100 == 9 ? 4 : 3)  // where 64 registers are enough
    mask_tiles(const __grid_constant__ MaskTiles::Params p) {
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  if (p.rows == 1) return look_at_keys(p);
  if (p.mask.type == AttentionMask::kBool) return look_at_tile<AttentionMask::kBool>(p);
  if (p.mask.type == AttentionMask::kHalf) return look_at_tile<AttentionMask::kHalf>(p);
  if (p.mask.type == AttentionMask::kBfloat16) return look_at_tile<AttentionMask::kBfloat16>(p);
  look_at_tile<AttentionMask::kFloat>(p);
}

}  // namespace sage
