#include "torch/attention.h"

#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/attention/params.h"
#include "kernels/attention/sm90_qk_int8_pv_f16.h"
#include "kernels/mask/mask_tiles.h"
#include "kernels/quant/quant_k_int8.h"
#include "kernels/quant/quant_v.h"
#include "kernels/sequences.h"
#include "runtime/kernel_store.h"
#include "runtime/tensor_map.h"
#include "torch/arguments.h"
#include "torch/attention_kernels.h"

namespace sage {

namespace {

constexpr double kLog2E = 1.4426950408889634;

// One call: its tensors as [batch, .., .., head_dim], of packed sequences with batch 1, and what has been made of them.
struct Call {
  const AttentionKernel& kernel;
  AttentionShape shape;
  at::Tensor q, k, v;
  at::Tensor cu_seqlens_q, cu_seqlens_k;  // undefined: not packed; else shape.batch counts sequences
  bool is_causal;
  double sm_scale;
  bool smooth_k, smooth_v;
  runtime::CUstream stream;

  bool packed() const { return cu_seqlens_q.defined(); }
  int device() const { return q.get_device(); }
  int32_t head_dim() const { return kernel_head_dim(std::max(shape.head_dim, shape.v_head_dim)); }
  // Spans of 128 keys of K or V, quantised.
  int64_t kv_spans() const {
    return packed() ? shape.kv_heads * slots(shape.kv_len, shape.batch, QuantKInt8::kSpanN)
                    : int64_t{shape.batch} * shape.kv_heads * QuantKInt8::spans(shape.kv_len);
  }
  // How many of them a block of threads quantises: as many as leave some blocks for each of a large GPU's multiprocessors.
  int32_t spans_together() const {
    return packed() ? 1 : static_cast<int32_t>(std::clamp<int64_t>(kv_spans() / 1024, 1, 8));
  }
  int64_t kv_blocks() const {
    if (packed()) return kv_spans();
    const int32_t together = spans_together();
    return int64_t{shape.batch} * shape.kv_heads * ((QuantKInt8::spans(shape.kv_len) + together - 1) / together);
  }
  int32_t row_blocks() const { return (shape.qo_len + kernel.block_m(head_dim()) - 1) / kernel.block_m(head_dim()); }
  // Blocks of threads that compute neighbouring rows and share what they read of K and V: a pair, unless too much of its time one
  // would have no rows or, under a causal mask, wait for the other's keys.
  int32_t cluster() const {
    const bool even = row_blocks() % 2 == 0 && !is_causal;
    return kernel.persistent && !packed() && (even || row_blocks() >= 16) ? 2 : 1;
  }
  // Tiles of the output: rows of a cluster.
  int64_t row_tiles() const {
    // Of packed queries those beyond the last sequence count as one more.
    const int64_t tiles = packed() ? slots(shape.qo_len, shape.batch + 1, kernel.block_m(head_dim()))
                                   : int64_t{shape.batch} * ((row_blocks() + cluster() - 1) / cluster());
    return tiles * shape.q_heads;
  }
  // Heads of Q whose tiles are computed one beside the other: all, where K in 8 bits and V in 16 have 24 MiB, half of a large
  // GPU's L2 cache; else those of a power of two key heads that have 12. Of what was tried on an H200 that was fastest.
  int32_t heads_together() const {
    const int64_t all = int64_t{shape.batch} * shape.kv_heads;
    const int64_t bytes = int64_t{shape.kv_len} * head_dim() * 3;
    int64_t heads = all * bytes <= int64_t{24} << 20 ? all : 1;
    while (heads < all && 2 * heads * bytes <= int64_t{12} << 20) heads *= 2;
    return static_cast<int32_t>(std::min(heads, all) * (shape.q_heads / shape.kv_heads));
  }
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type) const { return at::empty(sizes, q.options().dtype(type)); }
};

template <typename T>
T* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() && tensor.numel() > 0 ? static_cast<T*>(tensor.data_ptr()) : nullptr;
}

void launch(const Call& call, const char* kernel, int64_t blocks, int32_t threads, bool overlaps_previous, void* params) {
  runtime::KernelStore::get().launch({instance_name(kernel, call.head_dim(), call.k), kernel, call.device(), call.stream,
                                      grid_size(blocks), static_cast<uint32_t>(threads), 0, overlaps_previous},
                                     params);
}

// K or V as the attention kernel takes it, with its scales and the mean that was subtracted (undefined without smoothing).
struct Quantised {
  at::Tensor data, scale, mean;
};

// What the kernels that quantise K and V are told alike.
template <typename Params>
Params quantisation(const Call& call, int32_t head_dim) {
  Params params{};
  params.kv_heads = call.shape.kv_heads;
  params.kv_len = call.shape.kv_len;
  params.head_dim = head_dim;
  params.sequences = call.shape.batch;
  params.together = call.spans_together();
  params.cu_seqlens = data_or_null<int32_t>(call.cu_seqlens_k);
  return params;
}

Quantised quantise_k(const Call& call, const at::Tensor& next_tile, int32_t first_tile) {
  Quantised k;
  k.data = call.empty({call.kv_spans(), QuantKInt8::kSpanN, call.head_dim()}, at::kChar);
  k.scale = call.empty({call.kv_spans(), QuantKInt8::kSpanN / QuantKInt8::kBlockN, QuantKInt8::kScales}, at::kFloat);
  if (call.smooth_k) k.mean = call.empty({call.shape.batch, call.shape.kv_heads, call.head_dim()}, at::kFloat);

  auto params = quantisation<QuantKInt8::Params>(call, call.shape.head_dim);
  params.k = view(call.k, call.shape.heads_first);
  params.k_int8 = data_or_null<int8_t>(k.data);
  params.k_scale = data_or_null<float>(k.scale);
  params.k_mean = data_or_null<float>(k.mean);
  params.next_tile = data_or_null<int32_t>(next_tile);
  params.first_tile = first_tile;
  launch(call, "quant_k_int8", call.kv_blocks(), QuantKInt8::kThreads, /*overlaps_previous=*/false, &params);
  return k;
}

Quantised quantise_v(const Call& call) {
  const int32_t head_dim = call.head_dim();
  Quantised v;
  v.data = call.empty({call.kv_spans(), QuantV::kSpanN, head_dim * call.kernel.v_bytes}, at::kByte);
  v.scale = call.empty({call.kv_spans(), QuantV::kSpanN / QuantV::kBlockN, call.kernel.v_scale_bytes(head_dim)}, at::kByte);
  if (call.smooth_v && call.kernel.v_smooths) v.mean = call.empty({call.shape.batch, call.shape.kv_heads, head_dim}, at::kFloat);

  auto params = quantisation<QuantV::Params>(call, call.shape.v_head_dim);
  params.v = view(call.v, call.shape.heads_first);
  params.v_quantised = data_or_null<uint8_t>(v.data);
  params.v_scale = data_or_null<uint8_t>(v.scale);
  params.v_mean = data_or_null<float>(v.mean);
  launch(call, call.kernel.quant_v, call.kv_blocks(), QuantV::threads(head_dim), /*overlaps_previous=*/true, &params);
  return v;
}

// A mask as kernels are told of it, with the tensors that it lies in.
struct LookedAt {
  at::Tensor data, tiles, bits;
  AttentionMask mask{};
  int32_t batch = 1, heads = 1, rows = 1;  // of data, 1 where it is broadcast
};

// The strides of a mask in bytes: 0 where it is broadcast to [batch, q_heads, qo_len, kv_len].
std::array<int64_t, 4> mask_strides(const Call& call, const at::Tensor& mask) {
  const AttentionShape& shape = call.shape;
  const at::Tensor expanded = mask.expand({shape.batch, shape.q_heads, shape.qo_len, shape.kv_len});
  std::array<int64_t, 4> strides{};
  for (int i = 0; i < 4; ++i) {
    if (expanded.size(i) > 1) strides[i] = expanded.stride(i) * static_cast<int64_t>(expanded.element_size());
  }
  return strides;
}

// Whether rows start on 16 bytes and their keys lie one after the other: the copy engine, and vectors, read such.
bool has_even_rows(const at::Tensor& mask, const std::array<int64_t, 4>& strides) {
  return reinterpret_cast<uintptr_t>(mask.data_ptr()) % 16 == 0 && strides[0] % 16 == 0 && strides[1] % 16 == 0 &&
         strides[2] % 16 == 0 && strides[3] == static_cast<int64_t>(mask.element_size());
}

// A copy that has, no larger than the mask but for its keys.
at::Tensor with_even_rows(const at::Tensor& mask, int64_t keys) {
  std::vector<int64_t> sizes(4 - mask.dim(), 1);
  sizes.insert(sizes.end(), mask.sizes().begin(), mask.sizes().end());
  sizes[3] = (keys + 7) / 8 * 8;
  const at::Tensor rows = at::empty(sizes, mask.options()).slice(3, 0, keys);
  rows.copy_(mask);
  return rows;
}

// Has the mask looked at once: mask_tiles.cu.
LookedAt look_at_mask(const Call& call, const at::Tensor& attn_mask) {
  constexpr int64_t kLargestStride = 1 << 24;  // in bytes: 32 bits then do within a tile
  const AttentionShape& shape = call.shape;
  TORCH_CHECK_VALUE(attn_mask.device() == call.q.device(), "attn_mask: expected device ", call.q.device(),
                    " as q, got ", attn_mask.device());
  const at::ScalarType type = attn_mask.scalar_type();
  TORCH_CHECK_TYPE(type == at::kBool || type == at::kHalf || type == at::kBFloat16 || type == at::kFloat,
                   "attn_mask: expected dtype bool, float16, bfloat16 or float32, got ", type);
  const bool bits = call.kernel.persistent;
  TORCH_CHECK_TYPE(!bits || type == at::kBool || type == call.q.scalar_type(), "attn_mask: the kernel ", call.kernel.name,
                   " takes dtype bool or that of q, ", call.q.scalar_type(), ", got ", type);
  LookedAt looked;
  looked.data = attn_mask;
  auto strides = mask_strides(call, attn_mask);
  if (bits && type != at::kBool && !has_even_rows(attn_mask, strides)) {
    looked.data = with_even_rows(attn_mask, shape.kv_len);
    strides = mask_strides(call, looked.data);
  }
  TORCH_CHECK_VALUE(strides[2] < kLargestStride && strides[3] < kLargestStride, "attn_mask: expected rows and keys under ",
                    kLargestStride, " bytes apart, got strides ", attn_mask.strides(), "; call .contiguous() on it");
  const auto size = [&](int dimension, int32_t whole) { return strides[dimension] == 0 ? 1 : whole; };
  looked.batch = size(0, shape.batch);
  looked.heads = size(1, shape.q_heads);
  looked.rows = size(2, shape.qo_len);

  MaskTiles::Params params{};
  params.heads = looked.heads;
  params.causal = bits && call.is_causal ? 1 : 0;
  params.rows = params.causal != 0 ? shape.qo_len : looked.rows;
  params.keys = shape.kv_len;
  params.vectors = has_even_rows(looked.data, strides) ? 1 : 0;
  AttentionMask& mask = params.mask;
  mask.tile_rows = bits ? MaskTiles::kWgmmaRows : MaskTiles::kRows;
  const int64_t row_tiles = (params.rows + mask.tile_rows - 1) / mask.tile_rows;
  const int64_t key_tiles = (params.keys + MaskTiles::kKeys - 1) / MaskTiles::kKeys;
  looked.tiles = call.empty({looked.batch, looked.heads, row_tiles, key_tiles}, at::kByte);
  if (bits) looked.bits = call.empty({looked.tiles.numel(), MaskTiles::kWords}, at::kInt);

  mask.data = looked.data.data_ptr();
  mask.tiles = params.tiles = data_or_null<uint8_t>(looked.tiles);
  mask.bits = params.bits = data_or_null<uint32_t>(looked.bits);
  mask.batch_stride = strides[0];
  mask.head_stride = strides[1];
  mask.row_stride = strides[2];
  mask.key_stride = strides[3];
  mask.tiles_batch_stride = looked.batch == 1 ? 0 : looked.tiles.stride(0);
  mask.tiles_head_stride = looked.heads == 1 ? 0 : looked.tiles.stride(1);
  mask.tiles_row_stride = row_tiles == 1 ? 0 : looked.tiles.stride(2);
  mask.type = type == at::kBool   ? AttentionMask::kBool
              : type == at::kHalf ? AttentionMask::kHalf
              : type == at::kFloat ? AttentionMask::kFloat
                                   : AttentionMask::kBfloat16;
  looked.mask = mask;
  const int64_t tiles_together = MaskTiles::kRowBytes / static_cast<int64_t>(attn_mask.element_size()) / MaskTiles::kKeys;
  const int64_t blocks = int64_t{looked.batch} * looked.heads * ((params.rows + MaskTiles::kRows - 1) / MaskTiles::kRows) *
                         ((key_tiles + tiles_together - 1) / tiles_together);
  if (blocks > 0) {
    runtime::KernelStore::get().launch({"mask_tiles", "mask_tiles", call.device(), call.stream, grid_size(blocks),
                                        MaskTiles::kThreads, 0, /*overlaps_previous=*/false},
                                       &params);
  }
  return looked;
}

AttentionParams attention_params(const Call& call, const at::Tensor& out, const at::Tensor& lse, const Quantised& k,
                                 const Quantised& v) {
  AttentionParams params{};
  params.q = view(call.q, call.shape.heads_first);
  params.v = view(call.v, call.shape.heads_first);
  params.out = view(out, call.shape.heads_first);
  params.k_int8 = data_or_null<int8_t>(k.data);
  params.k_scale = data_or_null<float>(k.scale);
  params.k_mean = data_or_null<float>(k.mean);
  params.lse = data_or_null<float>(lse);
  params.heads_together = call.heads_together();
  params.batch = call.shape.batch;
  params.q_heads = call.shape.q_heads;
  params.kv_heads = call.shape.kv_heads;
  params.qo_len = call.shape.qo_len;
  params.kv_len = call.shape.kv_len;
  params.head_dim = call.shape.head_dim;
  params.v_head_dim = call.shape.v_head_dim;
  params.causal = call.is_causal ? 1 : 0;
  params.scale_log2 = static_cast<float>(call.sm_scale * kLog2E);
  params.v_quantised = data_or_null<uint8_t>(v.data);
  params.v_scale = data_or_null<uint8_t>(v.scale);
  params.v_mean = data_or_null<float>(v.mean);
  params.cu_seqlens_q = data_or_null<int32_t>(call.cu_seqlens_q);
  params.cu_seqlens_k = data_or_null<int32_t>(call.cu_seqlens_k);
  return params;
}

// Whether the kernel can do what is asked of it. Throws ValueError or TypeError if not.
void check_kernel(const Call& call) {
  const AttentionKernel& kernel = call.kernel;
  const std::string architecture = runtime::KernelStore::get().architecture(call.device());
  const int built_for = std::stoi(architecture.substr(architecture.find('_') + 1));
  TORCH_CHECK_VALUE(kernel.that_alone ? built_for == kernel.since && architecture.back() == 'a' : built_for >= kernel.since,
                    "kernel: ", kernel.name, " is compiled for sm_", kernel.since, kernel.that_alone ? "a alone" : " and later",
                    "; here is ", architecture);
  TORCH_CHECK_VALUE(!kernel.persistent || (call.shape.head_dim % 8 == 0 && call.shape.v_head_dim % 8 == 0),
                    "q, v: the kernel ", kernel.name, " wants multiples of 8 as head_dim, got ", call.shape.head_dim, " and ",
                    call.shape.v_head_dim);
  TORCH_CHECK_VALUE(kernel.v_differs || call.shape.v_head_dim == call.shape.head_dim, "v: the kernel ", kernel.name,
                    " wants the head_dim of q, ", call.shape.head_dim, ", got ", call.shape.v_head_dim);
}

// Whether PyTorch's attention by cuDNN is as fast and can do it: few queries do not repay quantising K, few keys leave nothing to save.
// cuDNN's wants rows that start on 16 bytes.
bool is_for_pytorch(const Call& call) {
  const AttentionShape& shape = call.shape;
  if (shape.qo_len > call.kernel.few_queries && shape.kv_len > call.kernel.few_keys) return false;
  for (const at::Tensor* tensor : {&call.q, &call.k, &call.v}) {
    if (!copy_engine_reads(*tensor, view(*tensor, shape.heads_first))) return false;
  }
  // For scales of 0 and below cuDNN returns NaN.
  return shape.head_dim == shape.v_head_dim && shape.head_dim <= 128 && call.q.numel() > 0 && call.sm_scale > 0.0;
}

// The operator itself: which backends a caller has allowed, and autocast, change nothing.
std::tuple<at::Tensor, at::Tensor> pytorch_attention(const Call& call, bool return_lse) {
  const auto heads_first = [&](const at::Tensor& x) { return call.shape.heads_first ? x : x.transpose(1, 2); };
  const auto result = at::_scaled_dot_product_cudnn_attention(heads_first(call.q), heads_first(call.k), heads_first(call.v), std::nullopt,
                                                              return_lse, 0.0, call.is_causal, false, call.sm_scale);
  const at::Tensor lse = return_lse ? std::get<1>(result).view({call.shape.batch, call.shape.q_heads, call.shape.qo_len})
                                    : call.empty({0}, at::kFloat);
  return {heads_first(std::get<0>(result)).contiguous(), lse};
}

void run(Call& call, const at::Tensor& out, const at::Tensor& lse, const std::optional<at::Tensor>& attn_mask) {
  check_kernel(call);
  if (out.numel() == 0) return;
  if (call.shape.kv_len == 0 || call.shape.batch == 0) {  // of packed sequences: no query sees a key
    out.zero_();
    if (lse.numel() > 0) lse.fill_(-std::numeric_limits<float>::infinity());
    return;
  }
  const AttentionKernel& kernel = call.kernel;
  call.stream = current_stream(call.device());
  LookedAt looked;
  if (attn_mask.has_value()) looked = look_at_mask(call, *attn_mask);
  runtime::KernelStore& store = runtime::KernelStore::get();
  const int32_t head_dim = call.head_dim();
  at::Tensor next_tile;
  const uint32_t cluster = static_cast<uint32_t>(call.cluster());
  uint32_t grid = grid_size(call.row_tiles() * cluster);
  if (kernel.persistent) {
    // Rows that do not start on 16 bytes, and repeated ones, the copy engine cannot read.
    for (at::Tensor* tensor : {&call.q, &call.v}) {
      if (!copy_engine_reads(*tensor, view(*tensor, call.shape.heads_first))) *tensor = tensor->clone(at::MemoryFormat::Contiguous);
    }
    next_tile = call.empty({1}, at::kInt);
    grid = std::min(grid, static_cast<uint32_t>(store.multiprocessors(call.device())) / cluster * cluster);
  }
  const Quantised k = quantise_k(call, next_tile, static_cast<int32_t>(grid / cluster));
  const Quantised v = kernel.quant_v != nullptr ? quantise_v(call) : Quantised{};
  AttentionParams params = attention_params(call, out, lse, k, v);
  params.mask = looked.mask;

  const bool masked = kernel.persistent && attn_mask.has_value();
  const std::string name = std::string(kernel.name) + (masked ? "_masked" : "");
  runtime::Launch launch{instance_name(kernel.name, head_dim, call.q),
                         name.c_str(),
                         call.device(),
                         call.stream,
                         grid,
                         static_cast<uint32_t>(kernel.threads(head_dim)),
                         static_cast<uint32_t>(masked ? Sm90QkInt8PvF16::masked_shared_bytes(head_dim) : kernel.shared_bytes(head_dim)),
                         /*overlaps_previous=*/true,
                         cluster};
  if (!kernel.persistent) {
    store.launch(launch, &params);
  } else {
    using Kernel = Sm90QkInt8PvF16;
    Kernel::Params mapped{};
    static_cast<AttentionParams&>(mapped) = params;
    mapped.tiles = static_cast<int32_t>(call.row_tiles());
    mapped.next_tile = data_or_null<int32_t>(next_tile);
    // Packed sequences are one batch element of all tokens.
    const int32_t batch = call.packed() ? 1 : params.batch;
    if (Kernel::keeps_q(head_dim)) {
      mapped.q_map = runtime::encode_tensor_map(call.device(), params.q, batch, params.q_heads, params.qo_len, params.head_dim,
                                                Kernel::block_m(head_dim));
    }
    mapped.v_map = runtime::encode_tensor_map(call.device(), params.v, batch, params.kv_heads, params.kv_len, params.v_head_dim,
                                              Kernel::kBlockN);
    if (masked && looked.mask.type != AttentionMask::kBool) {
      const auto elements = [](int64_t bytes) { return bytes / 2; };
      const TensorView rows{looked.data.data_ptr(), elements(looked.mask.batch_stride), elements(looked.mask.head_stride),
                            elements(looked.mask.row_stride), 1};
      mapped.mask_map = runtime::encode_tensor_map(call.device(), rows, looked.batch, looked.heads, looked.rows, params.kv_len,
                                                   MaskTiles::kWgmmaRows);
    }
    store.launch(launch, &mapped);
  }
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                             const std::optional<at::Tensor>& attn_mask, c10::string_view tensor_layout,
                                             bool is_causal, double sm_scale, bool smooth_k, bool smooth_v,
                                             bool return_lse, bool or_pytorch, c10::string_view kernel_name) {
  const AttentionKernel& kernel = attention_kernel(kernel_name);
  const AttentionShape shape = check_attention(q, k, v, tensor_layout, kernel.largest_head_dim);
  TORCH_CHECK_VALUE(shape.kv_len >= 1 || q.numel() == 0, "k: expected at least one token, got none");
  TORCH_CHECK_VALUE(kernel.masks || !attn_mask.has_value(), "attn_mask: the kernel ", kernel.name, " takes none");
  Call call{kernel, shape, q, k, v, {}, {}, is_causal, sm_scale, smooth_k, smooth_v, nullptr};
  if (or_pytorch && !attn_mask.has_value() && is_for_pytorch(call)) return pytorch_attention(call, return_lse);
  std::vector<int64_t> sizes = q.sizes().vec();
  sizes.back() = shape.v_head_dim;
  const at::Tensor lse =
      return_lse ? call.empty({shape.batch, shape.q_heads, shape.qo_len}, at::kFloat) : call.empty({0}, at::kFloat);
  const at::Tensor out = call.empty(sizes, q.scalar_type());
  run(call, out, lse, attn_mask);
  return {out, lse};
}

std::tuple<at::Tensor, at::Tensor> attention_varlen(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                    const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                                                    int64_t max_seqlen_q, int64_t max_seqlen_k, bool is_causal,
                                                    double sm_scale, bool smooth_k, bool smooth_v, bool return_lse,
                                                    c10::string_view kernel_name) {
  // Grids are sized without them: kernels/sequences.h.
  static_cast<void>(max_seqlen_q);
  static_cast<void>(max_seqlen_k);
  const AttentionKernel& kernel = attention_kernel(kernel_name);
  TORCH_CHECK_VALUE(kernel.packed, "kernel: ", kernel.name, " takes no packed sequences");
  check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q);
  check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q);
  TORCH_CHECK_VALUE(cu_seqlens_k.size(0) == cu_seqlens_q.size(0), "cu_seqlens_k: expected ", cu_seqlens_q.size(0),
                    " elements as cu_seqlens_q, got ", cu_seqlens_k.size(0));
  for (const at::Tensor* tensor : {&q, &k, &v}) {
    TORCH_CHECK_VALUE(tensor->dim() == 3, "q, k, v: expected [tokens, heads, head_dim], got ", tensor->sizes());
  }
  Call call{kernel,    {},       q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), cu_seqlens_q, cu_seqlens_k,
            is_causal, sm_scale, smooth_k,       smooth_v,       nullptr};
  call.shape = check_attention(call.q, call.k, call.v, "NHD", kernel.largest_head_dim);
  call.shape.batch = static_cast<int32_t>(cu_seqlens_q.size(0) - 1);
  const at::Tensor out = call.empty({q.size(0), q.size(1), v.size(2)}, q.scalar_type());
  const at::Tensor lse = return_lse ? call.empty({q.size(1), q.size(0)}, at::kFloat) : call.empty({0}, at::kFloat);
  run(call, out.unsqueeze(0), lse, std::nullopt);
  return {out, lse};
}

}  // namespace sage
