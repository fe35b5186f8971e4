#include "torch/mask.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/mask/mask_tiles.h"

namespace sage {

namespace {

// A copy whose rows are a multiple of eight keys apart. What is expanded is copied once.
Tensor with_even_rows(const Tensor& mask, int64_t keys) {
  std::vector<int64_t> sizes(4 - mask.dim(), 1), strides(4 - mask.dim(), 0);
  for (int64_t i = 0; i < mask.dim(); ++i) {
    sizes.push_back(mask.stride(i) == 0 ? std::min<int64_t>(mask.size(i), 1) : mask.size(i));
    strides.push_back(mask.stride(i));
  }
  if (mask.dim() == 0 || mask.size(mask.dim() - 1) == 1) strides[3] = 0;
  sizes[3] = (keys + 7) / 8 * 8;
  const Tensor whole = empty(sizes, mask.scalar_type(), mask);
  sizes[3] = keys;
  const Tensor rows = whole.as_strided(sizes, whole.strides());
  rows.copy_(mask.as_strided(sizes, strides));
  return rows;
}

}  // namespace

bool has_even_rows(const AttentionMask& mask, int64_t element_size, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(mask.data) % bytes == 0 && mask.batch_stride % bytes == 0 && mask.head_stride % bytes == 0 &&
         mask.row_stride % bytes == 0 && mask.key_stride == element_size;
}

AttentionMask described(const Call& call, const Tensor& attn_mask) {
  TORCH_CHECK_VALUE(attn_mask.device() == call.q.device(), "attn_mask: expected device ", call.q.device(),
                    " as q, got ", attn_mask.device());
  const ScalarType type = attn_mask.scalar_type();
  TORCH_CHECK_TYPE(type == kBool || type == kHalf || type == kBFloat16 || type == kFloat,
                   "attn_mask: expected dtype bool, float16, bfloat16 or float32, got ", type);
  AttentionMask mask{};
  mask.data = attn_mask.data_ptr();
  mask.type = type == kBool   ? AttentionMask::kBool
              : type == kHalf ? AttentionMask::kHalf
              : type == kFloat ? AttentionMask::kFloat
                                   : AttentionMask::kBfloat16;
  const int64_t whole[] = {call.shape.batch, call.shape.q_heads, call.shape.qo_len, call.shape.kv_len};
  int64_t* const strides[] = {&mask.batch_stride, &mask.head_stride, &mask.row_stride, &mask.key_stride};
  const int64_t missing = 4 - attn_mask.dim();
  TORCH_CHECK_VALUE(missing >= 0, "attn_mask: expected at most 4 dimensions, got ", attn_mask.dim());
  for (int64_t i = 0; i < attn_mask.dim(); ++i) {
    TORCH_CHECK_VALUE(attn_mask.size(i) == 1 || attn_mask.size(i) == whole[missing + i],
                      "attn_mask: expected a shape that broadcasts to ", IntArrayRef(whole, 4), ", got ", attn_mask.sizes());
    if (attn_mask.size(i) > 1) *strides[missing + i] = attn_mask.stride(i) * static_cast<int64_t>(attn_mask.element_size());
  }
  TORCH_CHECK_VALUE(mask.key_stride < AttentionMask::kLargestKeyStride, "attn_mask: expected keys under ", AttentionMask::kLargestKeyStride,
                    " bytes apart, got strides ", attn_mask.strides(), "; call .contiguous() on it");
  TORCH_CHECK_VALUE(mask.row_stride < AttentionMask::kLargestRowStride, "attn_mask: expected rows under ", AttentionMask::kLargestRowStride,
                    " bytes apart, got strides ", attn_mask.strides(), "; call .contiguous() on it, or where its rows are so long on parts of its keys, and merge these by return_lse");
  return mask;
}

Tensor of_first_keys(const Call& call, const Tensor& attn_mask, int64_t keys) {
  static_cast<void>(described(call, attn_mask));  // as it was given
  if (attn_mask.dim() == 0 || attn_mask.size(attn_mask.dim() - 1) == 1) return attn_mask;
  std::vector<int64_t> sizes, strides;
  for (int64_t i = 0; i < attn_mask.dim(); ++i) {
    sizes.push_back(attn_mask.size(i));
    strides.push_back(attn_mask.stride(i));
  }
  sizes.back() = keys;
  return attn_mask.as_strided(sizes, strides);
}

MaskForm form_of(const AttentionMask& mask) {
  if (mask.type == AttentionMask::kBool) return mask.row_stride == 0 ? MaskForm::kBoolOfKeys : MaskForm::kBool;
  if (mask.row_stride == 0) return MaskForm::kNumbersOfKeys;
  return mask.head_stride == 0 ? MaskForm::kNumbers : MaskForm::kNumbersOfHeads;
}

MaskForm form_of(const Call& call, const std::optional<Tensor>& attn_mask) {
  return attn_mask.has_value() ? form_of(described(call, *attn_mask)) : MaskForm::kNone;
}

bool has_hoppers_type(const Call& call, const Tensor& attn_mask) {
  return attn_mask.scalar_type() == kBool || attn_mask.scalar_type() == call.q.scalar_type();
}

void check_hoppers_type(const Call& call, const Tensor& attn_mask) {
  TORCH_CHECK_TYPE(has_hoppers_type(call, attn_mask), "attn_mask: the kernel ", call.kernel.name, " takes dtype bool or that of q, ", call.q.scalar_type(),
                   ", got ", attn_mask.scalar_type());
}

LookedAt look_at_mask(const Call& call, const Tensor& attn_mask) {
  const AttentionShape& shape = call.shape;
  const bool bits = call.kernel.wgmma_int8;
  LookedAt looked;
  looked.data = attn_mask;
  AttentionMask mask = described(call, attn_mask);
  if (bits) check_hoppers_type(call, attn_mask);
  const auto element_size = static_cast<int64_t>(attn_mask.element_size());
  if (bits && mask.type != AttentionMask::kBool && !has_even_rows(mask, element_size)) {
    looked.data = with_even_rows(attn_mask, shape.kv_len);
    mask = described(call, looked.data);
  }
  looked.batch = mask.batch_stride == 0 ? 1 : shape.batch;
  looked.heads = mask.head_stride == 0 ? 1 : shape.q_heads;
  looked.rows = mask.row_stride == 0 ? 1 : shape.qo_len;

  MaskTiles::Params params{};
  params.heads = looked.heads;
  params.causal = bits && call.options.is_causal ? 1 : 0;
  params.rows = params.causal != 0 ? shape.qo_len : looked.rows;
  params.keys = shape.kv_len;
  params.alone = call.options.is_causal ? 0 : 1;
  params.vectors = has_even_rows(mask, element_size) ? 1 : 0;
  mask.tile_rows = bits ? MaskTiles::kWgmmaRows : MaskTiles::kRows;
  const int64_t row_tiles = (params.rows + mask.tile_rows - 1) / mask.tile_rows;
  const int64_t key_tiles = (params.keys + MaskTiles::kKeys - 1) / MaskTiles::kKeys;
  const int64_t tiles = int64_t{looked.batch} * looked.heads * row_tiles * key_tiles;
  TORCH_CHECK_VALUE(tiles <= std::numeric_limits<int32_t>::max(), "attn_mask: too large: ", tiles, " tiles of ", mask.tile_rows, " queries x ",
                    MaskTiles::kKeys, " keys, at most 2^31 - 1");
  looked.tiles = call.empty({looked.batch, looked.heads, row_tiles, key_tiles}, kByte);
  if (bits) looked.bits = call.empty({tiles, MaskTiles::kWords}, kInt);
  params.count = static_cast<uint32_t>(tiles);

  mask.tiles = params.tiles = data_or_null<uint8_t>(looked.tiles);
  mask.bits = params.bits = data_or_null<uint32_t>(looked.bits);
  mask.tiles_batch_stride = looked.batch == 1 ? 0 : looked.tiles.stride(0);
  mask.tiles_head_stride = looked.heads == 1 ? 0 : looked.tiles.stride(1);
  mask.tiles_row_stride = row_tiles == 1 ? 0 : looked.tiles.stride(2);
  params.mask = looked.mask = mask;
  looked.seen_by_tiles = call.empty({tiles, SeenKeys::kWords}, kInt);
  params.seen = data_or_null<uint32_t>(looked.seen_by_tiles);
  if (params.count == 0) return looked;
  launch_common(call, "mask_tiles", (int64_t{params.count} + MaskTiles::kTilesOfBlock - 1) / MaskTiles::kTilesOfBlock, MaskTiles::kThreads, &params);
  const int64_t parts = looked.heads * row_tiles;
  looked.seen = {params.seen, looked.batch == 1 ? 0 : key_tiles * SeenKeys::kWords};
  if (parts == 1) return looked;
  looked.seen_keys = call.empty({looked.batch, key_tiles, SeenKeys::kWords}, kInt);
  looked.seen.data = data_or_null<uint32_t>(looked.seen_keys);
  SeenKeys::Params added{params.seen, data_or_null<uint32_t>(looked.seen_keys), static_cast<int32_t>(parts), static_cast<int32_t>(key_tiles),
                         static_cast<int32_t>(looked.batch * key_tiles)};
  launch_common(call, "seen_keys", (added.count + SeenKeys::kTilesOfBlock - 1) / SeenKeys::kTilesOfBlock, SeenKeys::kThreads, &added);
  return looked;
}

}  // namespace sage
