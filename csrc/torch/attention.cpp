#include "torch/attention.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/attention/params.h"
#include "kernels/attention/sm120_qk_fp4_pv_fp4.h"
#include "kernels/attention/sm90_qk_int8_pv_f16_masked.h"
#include "kernels/mask/mask_tiles.h"
#include "kernels/quant/means.h"
#include "kernels/quant/quant_k_int8.h"
#include "kernels/quant/quant_kv_fp4.h"
#include "kernels/quant/quant_v.h"
#include "kernels/sequences.h"
#include "runtime/kernel_store.h"
#include "runtime/tensor_map.h"
#include "torch/arguments.h"
#include "torch/attention_kernels.h"
#include "torch/tensor.h"

namespace sage {

namespace {

constexpr double kLog2E = 1.4426950408889634;

// One call: its tensors as [batch, .., .., head_dim], of packed sequences with batch 1, and what has been made of them.
struct Call {
  const AttentionKernel& kernel;
  AttentionShape shape;
  Tensor q, k, v;
  Tensor cu_seqlens_q, cu_seqlens_k;  // undefined: not packed; else shape.batch counts sequences
  double sm_scale;
  AttentionOptions options;
  runtime::CUstream stream = nullptr;

  bool packed() const { return cu_seqlens_q.defined(); }
  int device() const { return q.get_device(); }
  int32_t head_dim() const { return kernel_head_dim(std::max(shape.head_dim, shape.v_head_dim)); }
  // Spans of 128 keys of K or V, quantised.
  int64_t kv_spans() const { return kv_spans_of(shape.kv_heads); }
  int64_t kv_spans_of(int64_t heads) const {
    return heads * (packed() ? slots(shape.kv_len, shape.batch, QuantKInt8::kSpanN)
                             : int64_t{shape.batch} * QuantKInt8::spans(shape.kv_len));
  }
  // How many of them a block of threads quantises: so many that a large GPU's multiprocessors have all blocks at once, four each, where that are
  // few. A second round of a few blocks takes as long as the first.
  int32_t spans_together() const {
    return packed() ? 1 : static_cast<int32_t>(std::clamp<int64_t>((kv_spans() + 511) / 512, 1, 4));
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
    const bool even = row_blocks() % 2 == 0 && !options.is_causal;
    return kernel.persistent && !packed() && (even || row_blocks() >= 16) ? 2 : 1;
  }
  // Blocks of threads that share a span's products with means of Q: more than one where spans of few heads of K would not fill a large GPU.
  int32_t parts() const {
    const int32_t rows = shape.q_heads / shape.kv_heads * means();
    return static_cast<int32_t>(std::clamp<int64_t>(1024 / kv_spans(), 1, (rows + QuantKFp4::kMeans - 1) / QuantKFp4::kMeans));
  }
  // Means of Q for each head of a batch element or packed sequence.
  int32_t means() const { return options.per_block_mean && !packed() ? row_blocks() : 1; }
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
  Tensor empty(IntArrayRef sizes, ScalarType type) const { return sage::empty(sizes, type, q); }
};

// What blocks of a persistent kernel take one after the other: Sm90QkInt8PvF16::Params.
struct Items {
  int32_t tiles = 0, parted_tiles = 0, parts = 1, count = 0;
  uint32_t clusters = 0;  // that take them

  Items() = default;
  Items(const Call& call, int32_t multiprocessors, bool masked) {
    // Leaving parts and adding them up takes as long as so many blocks of keys.
    constexpr int32_t kBlocksOfParting = 12;
    tiles = static_cast<int32_t>(grid_size(call.row_tiles()));
    const int32_t at_once = multiprocessors / call.cluster();
    // Tiles of the last round, which some of the clusters have and the others wait for. A tile of few rows is half of one.
    const int32_t rows = call.cluster() * Sm90QkInt8PvF16::block_m(call.head_dim());
    const int32_t short_tiles = (call.shape.qo_len - 1) % rows < rows / 2 ? call.shape.batch * call.shape.q_heads : 0;
    const int32_t last_round = (tiles - short_tiles / 2) % at_once;
    if (last_round > 0 && !masked && !call.packed() && !call.options.is_causal) {
      const int32_t blocks = (call.shape.kv_len + QuantKInt8::kBlockN - 1) / QuantKInt8::kBlockN;
      parts = std::min(at_once / last_round, Sm90QkInt8PvF16::kMostParts);
      if (blocks * (parts - 1) < kBlocksOfParting * parts) parts = 1;
    }
    parted_tiles = parts > 1 ? last_round : 0;
    count = tiles + parted_tiles * (parts - 1);
    clusters = static_cast<uint32_t>(std::min(count, at_once));
  }
};

template <typename T>
T* data_or_null(const Tensor& tensor) {
  return tensor.defined() && tensor.numel() > 0 ? static_cast<T*>(tensor.data_ptr()) : nullptr;
}

void launch(const Call& call, const char* kernel, int64_t blocks, int32_t threads, bool overlaps_previous, void* params) {
  runtime::KernelStore::get().launch({instance_name(kernel, call.head_dim(), call.k), kernel, call.device(), call.stream,
                                      grid_size(blocks), static_cast<uint32_t>(threads), 0, overlaps_previous},
                                     params);
}

// K and V as the attention kernel takes them, with their scales and the means that were subtracted (null without smoothing), and the
// counter of tiles: parts of one tensor, since PyTorch takes a microsecond for each.
struct Workspace {
  Tensor memory;
  int8_t* k_int8 = nullptr;
  float *k_scale = nullptr, *k_mean = nullptr;
  uint8_t *v = nullptr, *v_scale = nullptr;
  float* v_mean = nullptr;
  int32_t* next_tile = nullptr;  // and behind it how many parts of parted tiles have arrived
  float* left = nullptr;         // what they leave
  uint8_t *k_fp4 = nullptr, *q_mean = nullptr;  // these and their scores: of FP4 alone
  float* mean_scores = nullptr;

  int32_t arrivals = 0;

  Workspace(const Call& call, const Items& items) {
    const int64_t spans = call.kv_spans(), head_dim = call.head_dim();
    const int64_t means = int64_t{call.shape.batch} * call.shape.kv_heads * head_dim;
    constexpr int64_t kBlocks = QuantKInt8::kSpanN / QuantKInt8::kBlockN;
    uint8_t* base = nullptr;
    int64_t bytes = 0;
    const auto take = [&](auto*& part, int64_t count) {
      if (base != nullptr && count > 0) part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(base + bytes);
      bytes += (count * static_cast<int64_t>(sizeof *part) + 255) / 256 * 256;
    };
    const auto lay_out = [&] {
      bytes = 0;
      if (call.kernel.fp4) {
        take(k_fp4, spans * kBlocks * Fp4::k_block(call.head_dim()));
        take(q_mean, int64_t{call.shape.batch} * call.shape.q_heads * call.means() * head_dim * 2);
        take(mean_scores, call.kv_spans_of(call.shape.q_heads) * call.means() * QuantKFp4::kSpanN);
      } else {
        take(k_int8, spans * QuantKInt8::kSpanN * head_dim);
        take(k_scale, spans * kBlocks * QuantKInt8::kScales);
      }
      take(k_mean, call.options.smooth_k ? means : 0);
      if (call.kernel.quant_v != nullptr) {
        take(v, spans * kBlocks * call.kernel.v_block_bytes(call.head_dim()));
        take(v_scale, spans * kBlocks * call.kernel.v_scale_bytes(call.head_dim()));
        take(v_mean, call.options.smooth_v && call.kernel.v_smooths ? means : 0);
      }
      take(next_tile, call.kernel.persistent ? 1 + arrivals : 0);
      take(left, int64_t{arrivals} * items.parts * Sm90QkInt8PvF16::left_floats(call.head_dim()) * 32);
    };
    arrivals = static_cast<int32_t>(int64_t{items.parted_tiles} * call.cluster() * Sm90QkInt8PvF16::consumer_warps(call.head_dim()));
    lay_out();
    memory = call.empty({bytes}, kByte);
    base = data_or_null<uint8_t>(memory);
    lay_out();
  }
};
static_assert(QuantV::kSpanN == QuantKInt8::kSpanN && QuantV::kBlockN == QuantKInt8::kBlockN && QuantKFp4::kSpanN == QuantV::kSpanN &&
              QuantKFp4::kBlockN == QuantV::kBlockN);

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

void quantise_k(const Call& call, const Workspace& workspace, uint32_t first_tile) {
  auto params = quantisation<QuantKInt8::Params>(call, call.shape.head_dim);
  params.k = view(call.k, call.shape.heads_first);
  params.k_int8 = workspace.k_int8;
  params.k_scale = workspace.k_scale;
  params.k_mean = workspace.k_mean;
  params.next_tile = workspace.next_tile;
  params.first_tile = static_cast<int32_t>(first_tile);
  params.zeros = workspace.arrivals;
  launch(call, "quant_k_int8", call.kv_blocks(), QuantKInt8::kThreads, /*overlaps_previous=*/false, &params);
}

QuantV::Params quantisation_of_v(const Call& call, const Workspace& workspace) {
  auto params = quantisation<QuantV::Params>(call, call.shape.v_head_dim);
  params.v = view(call.v, call.shape.heads_first);
  params.v_quantised = workspace.v;
  params.v_scale = workspace.v_scale;
  params.v_mean = workspace.v_mean;
  return params;
}

void quantise_v(const Call& call, const Workspace& workspace) {
  auto params = quantisation_of_v(call, workspace);
  launch(call, call.kernel.quant_v, call.kv_blocks(), QuantV::threads(call.head_dim()), /*overlaps_previous=*/true, &params);
}

// What is subtracted from Q and K.
void find_means(const Call& call, const Workspace& workspace) {
  const AttentionShape& shape = call.shape;
  Means::Params params{};
  params.q = view(call.q, shape.heads_first);
  params.k = view(call.k, shape.heads_first);
  params.q_mean = workspace.q_mean;
  params.k_mean = workspace.k_mean;
  params.q_heads = shape.q_heads;
  params.kv_heads = shape.kv_heads;
  params.qo_len = shape.qo_len;
  params.kv_len = shape.kv_len;
  params.head_dim = shape.head_dim;
  params.means = call.means();
  params.cu_seqlens_q = data_or_null<int32_t>(call.cu_seqlens_q);
  params.cu_seqlens_k = data_or_null<int32_t>(call.cu_seqlens_k);
  const int64_t q_blocks = int64_t{shape.batch} * shape.q_heads * call.means();
  const int64_t k_blocks = call.options.smooth_k ? int64_t{shape.batch} * shape.kv_heads : 0;
  params.q_blocks = static_cast<int32_t>(q_blocks);
  launch(call, "means", q_blocks + k_blocks, Means::kThreads, /*overlaps_previous=*/false, &params);
}

void quantise_kv_fp4(const Call& call, const Workspace& workspace) {
  QuantKvFp4::Params params{};
  params.v = quantisation_of_v(call, workspace);
  params.v_blocks = static_cast<int32_t>(call.kv_blocks());
  params.k_blocks = static_cast<int32_t>(call.kv_spans());
  params.k.k = view(call.k, call.shape.heads_first);
  params.k.k_fp4 = workspace.k_fp4;
  params.k.k_mean = workspace.k_mean;
  params.k.q_mean = workspace.q_mean;
  params.k.mean_scores = workspace.mean_scores;
  params.k.q_heads = call.shape.q_heads;
  params.k.kv_heads = call.shape.kv_heads;
  params.k.kv_len = call.shape.kv_len;
  params.k.head_dim = call.shape.head_dim;
  params.k.sequences = call.shape.batch;
  params.k.means = call.means();
  params.k.parts = call.parts();
  params.k.causal = call.options.is_causal ? 1 : 0;
  params.k.scale_log2 = static_cast<float>(call.sm_scale * kLog2E);
  params.k.cu_seqlens = params.v.cu_seqlens;
  launch(call, call.kernel.quant_v, call.kv_blocks() + call.parts() * call.kv_spans(), QuantKvFp4::threads(call.head_dim()),
         /*overlaps_previous=*/true, &params);
}

// A mask as kernels are told of it, with the tensors that it lies in.
struct LookedAt {
  Tensor data, tiles, bits;
  AttentionMask mask{};
  int32_t batch = 1, heads = 1, rows = 1;  // of data, 1 where it is broadcast
};

// The strides of a mask in bytes: 0 where it is broadcast to [batch, q_heads, qo_len, kv_len].
std::array<int64_t, 4> mask_strides(const Call& call, const Tensor& mask) {
  const int64_t whole[] = {call.shape.batch, call.shape.q_heads, call.shape.qo_len, call.shape.kv_len};
  const int64_t missing = 4 - mask.dim();
  std::array<int64_t, 4> strides{};
  TORCH_CHECK_VALUE(missing >= 0, "attn_mask: expected at most 4 dimensions, got ", mask.dim());
  for (int64_t i = 0; i < mask.dim(); ++i) {
    TORCH_CHECK_VALUE(mask.size(i) == 1 || mask.size(i) == whole[missing + i], "attn_mask: expected a shape that broadcasts to ",
                      IntArrayRef(whole, 4), ", got ", mask.sizes());
    if (mask.size(i) > 1) strides[missing + i] = mask.stride(i) * static_cast<int64_t>(mask.element_size());
  }
  return strides;
}

// Whether rows start on 16 bytes and their keys lie one after the other: the copy engine, and vectors, read such.
bool has_even_rows(const Tensor& mask, const std::array<int64_t, 4>& strides) {
  return reinterpret_cast<uintptr_t>(mask.data_ptr()) % 16 == 0 && strides[0] % 16 == 0 && strides[1] % 16 == 0 &&
         strides[2] % 16 == 0 && strides[3] == static_cast<int64_t>(mask.element_size());
}

// A copy that has, no larger than the mask but for its keys.
Tensor with_even_rows(const Tensor& mask, int64_t keys) {
  std::vector<int64_t> sizes(4 - mask.dim(), 1);
  sizes.insert(sizes.end(), mask.sizes().begin(), mask.sizes().end());
  sizes[3] = (keys + 7) / 8 * 8;
  const Tensor whole = empty(sizes, mask.scalar_type(), mask);
  sizes[3] = keys;
  const Tensor rows = whole.as_strided(sizes, whole.strides());
  rows.copy_(mask);
  return rows;
}

// Has the mask looked at once: mask_tiles.cu.
LookedAt look_at_mask(const Call& call, const Tensor& attn_mask) {
  constexpr int64_t kLargestStride = 1 << 24;  // in bytes: 32 bits then do within a tile
  const AttentionShape& shape = call.shape;
  TORCH_CHECK_VALUE(attn_mask.device() == call.q.device(), "attn_mask: expected device ", call.q.device(),
                    " as q, got ", attn_mask.device());
  const ScalarType type = attn_mask.scalar_type();
  TORCH_CHECK_TYPE(type == kBool || type == kHalf || type == kBFloat16 || type == kFloat,
                   "attn_mask: expected dtype bool, float16, bfloat16 or float32, got ", type);
  const bool bits = call.kernel.persistent;
  TORCH_CHECK_TYPE(!bits || type == kBool || type == call.q.scalar_type(), "attn_mask: the kernel ", call.kernel.name,
                   " takes dtype bool or that of q, ", call.q.scalar_type(), ", got ", type);
  LookedAt looked;
  looked.data = attn_mask;
  auto strides = mask_strides(call, attn_mask);
  if (bits && type != kBool && !has_even_rows(attn_mask, strides)) {
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
  params.causal = bits && call.options.is_causal ? 1 : 0;
  params.rows = params.causal != 0 ? shape.qo_len : looked.rows;
  params.keys = shape.kv_len;
  params.vectors = has_even_rows(looked.data, strides) ? 1 : 0;
  AttentionMask& mask = params.mask;
  mask.tile_rows = bits ? MaskTiles::kWgmmaRows : MaskTiles::kRows;
  const int64_t row_tiles = (params.rows + mask.tile_rows - 1) / mask.tile_rows;
  const int64_t key_tiles = (params.keys + MaskTiles::kKeys - 1) / MaskTiles::kKeys;
  looked.tiles = call.empty({looked.batch, looked.heads, row_tiles, key_tiles}, kByte);
  if (bits) looked.bits = call.empty({looked.tiles.numel(), MaskTiles::kWords}, kInt);
  params.count = static_cast<uint32_t>(looked.tiles.numel());

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
  mask.type = type == kBool   ? AttentionMask::kBool
              : type == kHalf ? AttentionMask::kHalf
              : type == kFloat ? AttentionMask::kFloat
                                   : AttentionMask::kBfloat16;
  looked.mask = mask;
  const int64_t blocks = (int64_t{params.count} + MaskTiles::kTilesOfBlock - 1) / MaskTiles::kTilesOfBlock;
  if (blocks > 0) {
    runtime::KernelStore::get().launch({"mask_tiles", "mask_tiles", call.device(), call.stream, grid_size(blocks),
                                        MaskTiles::kThreads, 0, /*overlaps_previous=*/false},
                                       &params);
  }
  return looked;
}

AttentionParams attention_params(const Call& call, const Tensor& out, const Tensor& lse, const Workspace& workspace) {
  AttentionParams params{};
  params.q = view(call.q, call.shape.heads_first);
  params.v = view(call.v, call.shape.heads_first);
  params.out = view(out, call.shape.heads_first);
  params.k_int8 = workspace.k_int8;
  params.k_scale = workspace.k_scale;
  params.k_mean = workspace.k_mean;
  params.lse = data_or_null<float>(lse);
  params.heads_together = call.heads_together();
  params.batch = call.shape.batch;
  params.q_heads = call.shape.q_heads;
  params.kv_heads = call.shape.kv_heads;
  params.qo_len = call.shape.qo_len;
  params.kv_len = call.shape.kv_len;
  params.head_dim = call.shape.head_dim;
  params.v_head_dim = call.shape.v_head_dim;
  params.causal = call.options.is_causal ? 1 : 0;
  params.scale_log2 = static_cast<float>(call.sm_scale * kLog2E);
  params.v_quantised = workspace.v;
  params.v_scale = workspace.v_scale;
  params.v_mean = workspace.v_mean;
  params.cu_seqlens_q = data_or_null<int32_t>(call.cu_seqlens_q);
  params.cu_seqlens_k = data_or_null<int32_t>(call.cu_seqlens_k);
  return params;
}

// Whether the kernel can do what is asked of it. Throws ValueError or TypeError if not.
void check_kernel(const Call& call) {
  const AttentionKernel& kernel = call.kernel;
  const runtime::Architecture built_for = runtime::KernelStore::get().device(call.device()).built_for;
  TORCH_CHECK_VALUE(kernel.that_alone ? built_for.number == kernel.since && built_for.that_alone : built_for.number >= kernel.since,
                    "kernel: ", kernel.name, " is compiled for sm_", kernel.since, kernel.that_alone ? "a alone" : " and later",
                    "; here is ", runtime::KernelStore::get().architecture(call.device()));
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
  const int32_t few_queries = call.options.is_causal ? call.kernel.few_causal_queries : call.kernel.few_queries;
  if (shape.qo_len > few_queries && shape.kv_len > call.kernel.few_keys) return false;
  for (const Tensor* tensor : {&call.q, &call.k, &call.v}) {
    if (!copy_engine_reads(*tensor, view(*tensor, shape.heads_first))) return false;
  }
  // For scales of 0 and below cuDNN returns NaN.
  return shape.head_dim == shape.v_head_dim && call.q.numel() > 0 && call.sm_scale > 0.0;
}

// A copy whose elements lie one after the other.
Tensor copied(const Tensor& x) {
  Tensor copy = empty(x.sizes(), x.scalar_type(), x);
  copy.copy_(x);
  return copy;
}

// Tokens and heads for each other.
Tensor transposed(const Tensor& x) {
  return x.as_strided({x.size(0), x.size(2), x.size(1), x.size(3)}, {x.stride(0), x.stride(2), x.stride(1), x.stride(3)});
}

// Packed sequences as a batch of one.
Tensor batched(const Tensor& x) {
  return x.as_strided({1, x.size(0), x.size(1), x.size(2)}, {x.numel(), x.stride(0), x.stride(1), x.stride(2)});
}

std::tuple<Tensor, Tensor> pytorch_attention(const Call& call) {
  const AttentionShape& shape = call.shape;
  const auto turned = [&](const Tensor& x) { return shape.heads_first ? x : transposed(x); };
  const bool return_lse = call.options.return_lse;
  const auto [result, lse] =
      cudnn_attention(turned(call.q), turned(call.k), turned(call.v), return_lse, call.options.is_causal, call.sm_scale);
  const Tensor out = turned(result);
  const int64_t heads = shape.q_heads, rows = shape.qo_len;
  // Some releases of PyTorch add a dimension of 1.
  return {out.is_contiguous() ? out : copied(out),
          return_lse ? lse.as_strided({shape.batch, heads, rows}, {heads * rows, rows, 1}) : call.empty({0}, kFloat)};
}

void run(Call& call, const Tensor& out, const Tensor& lse, const std::optional<Tensor>& attn_mask) {
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
  const uint32_t cluster = static_cast<uint32_t>(call.cluster());
  const bool masked = kernel.persistent && attn_mask.has_value();
  Items items;
  uint32_t grid = grid_size(call.row_tiles() * cluster);
  if (kernel.persistent) {
    // Rows that do not start on 16 bytes, and repeated ones, the copy engine cannot read.
    for (Tensor* tensor : {&call.q, &call.v}) {
      if (!copy_engine_reads(*tensor, view(*tensor, call.shape.heads_first))) *tensor = copied(*tensor);
    }
    items = Items(call, store.device(call.device()).multiprocessors, masked);
    grid = items.clusters * cluster;
  }
  const Workspace workspace(call, items);
  if (kernel.fp4) {
    find_means(call, workspace);
    quantise_kv_fp4(call, workspace);
  } else {
    quantise_k(call, workspace, items.clusters);
    if (kernel.quant_v != nullptr) quantise_v(call, workspace);
  }
  AttentionParams params = attention_params(call, out, lse, workspace);
  params.mask = looked.mask;

  const char* name = masked ? kernel.masked : kernel.name;
  runtime::Launch launch{instance_name(name, head_dim, call.q),
                         name,
                         call.device(),
                         call.stream,
                         grid,
                         static_cast<uint32_t>(kernel.threads(head_dim)),
                         static_cast<uint32_t>(masked ? Sm90QkInt8PvF16Masked::shared_bytes(head_dim) : kernel.shared_bytes(head_dim)),
                         /*overlaps_previous=*/true,
                         cluster};
  if (kernel.fp4) {
    Sm120QkFp4PvFp4::Params extended{};
    static_cast<AttentionParams&>(extended) = params;
    extended.k_fp4 = workspace.k_fp4;
    extended.q_mean = workspace.q_mean;
    extended.mean_scores = workspace.mean_scores;
    extended.means = call.means();
    store.launch(launch, &extended);
  } else if (!kernel.persistent) {
    store.launch(launch, &params);
  } else {
    using Kernel = Sm90QkInt8PvF16;
    Kernel::Params mapped{};
    static_cast<AttentionParams&>(mapped) = params;
    mapped.next_tile = workspace.next_tile;
    mapped.tiles = items.tiles;
    mapped.items = items.count;
    mapped.parted_tiles = items.parted_tiles;
    mapped.parts = items.parts;
    mapped.left = workspace.left;
    mapped.arrived = workspace.next_tile + 1;
    // Packed sequences are one batch element of all tokens.
    const int32_t batch = call.packed() ? 1 : params.batch;
    if (Kernel::keeps_q(head_dim)) {
      mapped.q_map = runtime::encode_tensor_map(call.device(), params.q, batch, params.q_heads, params.qo_len, params.head_dim,
                                                Kernel::kRows);
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

std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& attn_mask,
                                     double sm_scale, int64_t bits) {
  const AttentionOptions options(bits);
  const AttentionKernel& kernel = attention_kernel(options.kernel);
  const AttentionShape shape = check_attention(q, k, v, options.heads_first, kernel.largest_head_dim);
  TORCH_CHECK_VALUE(shape.kv_len >= 1 || q.numel() == 0, "k: expected at least one token, got none");
  TORCH_CHECK_VALUE(kernel.masks || !attn_mask.has_value(), "attn_mask: the kernel ", kernel.name, " takes none");
  Call call{kernel, shape, q, k, v, {}, {}, sm_scale, options};
  if (options.or_pytorch && !attn_mask.has_value() && is_for_pytorch(call)) return pytorch_attention(call);
  const Tensor out = call.empty({q.size(0), q.size(1), q.size(2), shape.v_head_dim}, q.scalar_type());
  const Tensor lse = options.return_lse ? call.empty({shape.batch, shape.q_heads, shape.qo_len}, kFloat) : call.empty({0}, kFloat);
  run(call, out, lse, attn_mask);
  return {out, lse};
}

std::tuple<Tensor, Tensor> attention_varlen(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
                                            const Tensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
                                            double sm_scale, int64_t bits) {
  // Grids are sized without them: kernels/sequences.h.
  static_cast<void>(max_seqlen_q);
  static_cast<void>(max_seqlen_k);
  const AttentionOptions options(bits);
  const AttentionKernel& kernel = attention_kernel(options.kernel);
  TORCH_CHECK_VALUE(kernel.packed, "kernel: ", kernel.name, " takes no packed sequences");
  check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q);
  check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q);
  TORCH_CHECK_VALUE(cu_seqlens_k.size(0) == cu_seqlens_q.size(0), "cu_seqlens_k: expected ", cu_seqlens_q.size(0),
                    " elements as cu_seqlens_q, got ", cu_seqlens_k.size(0));
  for (const Tensor* tensor : {&q, &k, &v}) {
    TORCH_CHECK_VALUE(tensor->dim() == 3, "q, k, v: expected [tokens, heads, head_dim], got ", tensor->sizes());
  }
  Call call{kernel, {}, batched(q), batched(k), batched(v), cu_seqlens_q, cu_seqlens_k, sm_scale, options};
  call.shape = check_attention(call.q, call.k, call.v, /*heads_first=*/false, kernel.largest_head_dim);
  call.shape.batch = static_cast<int32_t>(cu_seqlens_q.size(0) - 1);
  const Tensor out = call.empty({q.size(0), q.size(1), v.size(2)}, q.scalar_type());
  const Tensor lse = options.return_lse ? call.empty({q.size(1), q.size(0)}, kFloat) : call.empty({0}, kFloat);
  run(call, batched(out), lse, std::nullopt);
  return {out, lse};
}

}  // namespace sage
