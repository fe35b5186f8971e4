// One call of an attention operator, as the host's steps see it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>

#include "kernels/quant/quant_k_int8.h"
#include "kernels/quant/quant_kv_fp4.h"
#include "kernels/sequences.h"
#include "runtime/kernel_store.h"
#include "torch/arguments.h"
#include "torch/attention.h"
#include "torch/attention_kernels.h"
#include "torch/tensor.h"

namespace sage {

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
  int32_t multiprocessors() const { return runtime::KernelStore::get().device(device()).multiprocessors; }
  // No number where it would be infinite, so that whatever is computed with it is none.
  float scale_log2() const {
    const auto scale = static_cast<float>(sm_scale * kLog2E);
    return std::isfinite(scale) ? scale : std::numeric_limits<float>::quiet_NaN();
  }
  bool scales_up() const { return scale_log2() >= std::numeric_limits<float>::min(); }  // larger scores stay larger, and infinite ones infinite
  int32_t head_dim() const { return kernel_head_dim(std::max(shape.head_dim, shape.v_head_dim)); }
  // Spans of 128 keys of K or V, quantised.
  int64_t kv_spans() const { return kv_spans_of(shape.kv_heads); }
  int64_t kv_spans_of(int64_t heads) const {
    return heads * (packed() ? slots(shape.kv_len, shape.batch, QuantKInt8::kSpanN)
                             : int64_t{shape.batch} * QuantKInt8::spans(shape.kv_len));
  }
  // How many of them a block of threads quantises: so many that a large GPU's multiprocessors have all blocks at once, two or three each, where that
  // are few. The sample is taken once a block, and a second round of a few blocks takes as long as the first.
  int32_t spans_together() const { return static_cast<int32_t>(std::clamp<int64_t>((kv_spans() + 351) / 352, 1, 4)); }
  // Lots of so many spans of a head of K or V; of all packed sequences.
  int32_t lots(int32_t together) const {
    if (packed()) return static_cast<int32_t>(slots(shape.kv_len, shape.batch, together * QuantKInt8::kSpanN));
    return (QuantKInt8::spans(shape.kv_len) + together - 1) / together;
  }
  int64_t kv_blocks() const { return int64_t{packed() ? 1 : shape.batch} * shape.kv_heads * lots(spans_together()); }
  // Blocks of threads that share a span's products with means of Q: more than one where spans of few heads of K would not fill a large GPU.
  int32_t parts() const {
    const int32_t rows = shape.q_heads / shape.kv_heads * means();
    return static_cast<int32_t>(std::clamp<int64_t>(1024 / kv_spans(), 1, (rows + QuantKFp4::kMeans - 1) / QuantKFp4::kMeans));
  }
  // Means of Q for each head of a batch element or packed sequence: of the rows of a block of threads.
  int32_t means() const {
    const int32_t rows = kernel.block_m(head_dim());
    return options.per_block_mean && !packed() ? (shape.qo_len + rows - 1) / rows : 1;
  }
  // Heads of Q of all batch elements. They have a tile each at least, and so are refused here as too many tiles are.
  int32_t all_heads() const { return static_cast<int32_t>(grid_size(int64_t{shape.batch} * shape.q_heads)); }
  // Heads of Q whose tiles are computed one beside the other: all, where K in 8 bits and V in 16 have 24 MiB, half of a large
  // GPU's L2 cache; else those of a power of two key heads that have 12. Of what was tried on an H200 that was fastest.
  int32_t heads_together() const {
    const int64_t all = int64_t{shape.batch} * shape.kv_heads;
    const int64_t bytes = int64_t{shape.kv_len} * head_dim() * 3;
    int64_t heads = all * bytes <= int64_t{24} << 20 ? all : 1;
    while (heads < all && 2 * heads * bytes <= int64_t{12} << 20) heads *= 2;
    return static_cast<int32_t>(std::min(heads, all) * (shape.q_heads / shape.kv_heads));
  }
  // Of the last heads twice as many, and what remains. Under a causal mask the tiles that take longest come first among them, and so many short ones
  // fill the end; those of one section alone are fewer than a large GPU's multiprocessors.
  int32_t last_heads() const {
    const int32_t all = all_heads(), together = heads_together();
    return all - std::max(0, all / together - 2) * together;
  }
  TensorView view(const Tensor& tensor) const { return sage::view(tensor, options.heads_first); }
  Tensor empty(IntArrayRef sizes, ScalarType type) const { return sage::empty(sizes, type, q); }
  // Output and log-sum-exp, not yet written; of tensors that are not packed.
  std::tuple<Tensor, Tensor> outputs() const {
    const int64_t sizes[] = {q.size(0), q.size(1), q.size(2), shape.v_head_dim};
    int64_t strides[] = {1, 1, 1, 1};
    int64_t stride = 1;
    for (const int dimension : {3, options.out_turned ? 1 : 2, options.out_turned ? 2 : 1, 0}) {
      strides[dimension] = stride;
      stride *= std::max<int64_t>(1, sizes[dimension]);
    }
    return {empty_strided({sizes, 4}, {strides, 4}, q.scalar_type(), q),
            options.return_lse ? empty({shape.batch, shape.q_heads, shape.qo_len}, kFloat) : empty({0}, kFloat)};
  }
};

template <typename T>
T* data_or_null(const Tensor& tensor) {
  return tensor.defined() && tensor.numel() > 0 ? static_cast<T*>(tensor.data_ptr()) : nullptr;
}

// Of a kernel whose instances are of head_dims of its own.
inline void launch_instance(const Call& call, const char* kernel, int32_t head_dim, int64_t blocks, int32_t threads, void* params, int32_t shared_bytes,
                            int32_t cluster = 1) {
  runtime::KernelStore::get().launch({instance_name(kernel, head_dim, call.k), kernel, call.device(), call.stream, grid_size(blocks),
                                      static_cast<uint32_t>(threads), static_cast<uint32_t>(shared_bytes), static_cast<uint32_t>(cluster)},
                                     params);
}

inline void launch(const Call& call, const char* kernel, int64_t blocks, int32_t threads, void* params, int32_t shared_bytes = 0, int32_t cluster = 1) {
  launch_instance(call, kernel, call.head_dim(), blocks, threads, params, shared_bytes, cluster);
}

// Of a kernel that is one for all head_dims and dtypes.
inline void launch_common(const Call& call, const char* kernel, int64_t blocks, int32_t threads, void* params) {
  runtime::KernelStore::get().launch({kernel, kernel, call.device(), call.stream, grid_size(blocks), static_cast<uint32_t>(threads), 0}, params);
}

// What attention kernels are told alike, whatever they are.
template <typename Params>
void fill_in(const Call& call, const Tensor& out, const Tensor& lse, Params& params) {
  const AttentionShape& shape = call.shape;
  params.q = call.view(call.q);
  params.v = call.view(call.v);
  params.out = call.view(out);
  params.lse = data_or_null<float>(lse);
  params.batch = shape.batch;
  params.q_heads = shape.q_heads;
  params.kv_heads = shape.kv_heads;
  params.qo_len = shape.qo_len;
  params.kv_len = shape.kv_len;
  params.head_dim = shape.head_dim;
  params.v_head_dim = shape.v_head_dim;
  params.causal = call.options.is_causal ? 1 : 0;
  params.scale_log2 = call.scale_log2();
}

// Copies a tensor that the copy engine cannot read: rows that do not start on 16 bytes, and repeated ones.
inline void make_readable(const Call& call, Tensor& x) {
  if (copy_engine_reads(x, call.options.heads_first)) return;
  const Tensor copy = empty(x.sizes(), x.scalar_type(), x);
  copy.copy_(x);
  x = copy;
}

}  // namespace sage
