#include "torch/attention.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <cmath>

#include "kernels/attention/sm80_qk_int8_pv_f16.h"
#include "kernels/quant/quant_k_int8.h"
#include "runtime/kernel_store.h"
#include "torch/arguments.h"

namespace sage {

namespace {

constexpr double kLog2E = 1.4426950408889634;

struct QuantisedK {
  at::Tensor int8;
  at::Tensor scale;
  at::Tensor mean;  // undefined without smoothing
};

QuantisedK quantise_k(const at::Tensor& k, const AttentionShape& shape, bool smooth_k, runtime::CUstream stream) {
  const int32_t head_dim = kernel_head_dim(shape.head_dim);
  const int64_t heads = int64_t{shape.batch} * shape.kv_heads;
  const int64_t blocks = (shape.kv_len + QuantKInt8::kBlockN - 1) / QuantKInt8::kBlockN;
  QuantisedK result;
  result.int8 = at::empty({heads, blocks * QuantKInt8::kBlockN, head_dim}, k.options().dtype(at::kChar));
  result.scale = at::empty({heads, blocks, QuantKInt8::kGroups}, k.options().dtype(at::kFloat));
  if (smooth_k) result.mean = at::empty({heads, head_dim}, k.options().dtype(at::kFloat));

  QuantKInt8::Params params{};
  params.k = view(k, shape.heads_first);
  params.k_int8 = static_cast<int8_t*>(result.int8.data_ptr());
  params.k_scale = static_cast<float*>(result.scale.data_ptr());
  params.k_mean = smooth_k ? static_cast<float*>(result.mean.data_ptr()) : nullptr;
  params.kv_heads = shape.kv_heads;
  params.kv_len = shape.kv_len;
  params.head_dim = shape.head_dim;
  runtime::KernelStore::get().launch({instance_name("quant_k_int8", head_dim, k), "quant_k_int8", k.get_device(),
                                      stream, grid_size(heads * blocks), QuantKInt8::kThreads, 0,
                                      /*overlaps_previous=*/false},
                                     &params);
  return result;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> qk_int8_pv_f16(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                  c10::string_view tensor_layout, bool is_causal, double sm_scale,
                                                  bool smooth_k, bool return_lse) {
  using Kernel = Sm80QkInt8PvF16;
  const AttentionShape shape = check_attention(q, k, v, tensor_layout, /*largest_head_dim=*/128);
  const int32_t head_dim = kernel_head_dim(shape.head_dim);
  at::Tensor out = at::empty(q.sizes(), q.options());
  at::Tensor lse = return_lse ? at::empty({shape.batch, shape.q_heads, shape.qo_len}, q.options().dtype(at::kFloat))
                              : at::empty({0}, q.options().dtype(at::kFloat));
  if (out.numel() == 0) return {out, lse};

  const int device = q.get_device();
  const runtime::CUstream stream = current_stream(device);
  const QuantisedK quantised = quantise_k(k, shape, smooth_k, stream);

  Kernel::Params params{};
  params.q = view(q, shape.heads_first);
  params.v = view(v, shape.heads_first);
  params.out = view(out, shape.heads_first);
  params.k_int8 = static_cast<const int8_t*>(quantised.int8.data_ptr());
  params.k_scale = static_cast<const float*>(quantised.scale.data_ptr());
  params.k_mean = smooth_k ? static_cast<const float*>(quantised.mean.data_ptr()) : nullptr;
  params.lse = return_lse ? static_cast<float*>(lse.data_ptr()) : nullptr;
  params.q_heads = shape.q_heads;
  params.kv_heads = shape.kv_heads;
  params.qo_len = shape.qo_len;
  params.kv_len = shape.kv_len;
  params.head_dim = shape.head_dim;
  params.causal = is_causal ? 1 : 0;
  params.scale_log2 = static_cast<float>(sm_scale * kLog2E);
  const int64_t q_blocks = (shape.qo_len + Kernel::kBlockM - 1) / Kernel::kBlockM;
  runtime::KernelStore::get().launch(
      {instance_name("sm80_qk_int8_pv_f16", head_dim, q), "sm80_qk_int8_pv_f16", device, stream,
       grid_size(q_blocks * shape.q_heads * shape.batch), Kernel::kThreads,
       static_cast<uint32_t>(Kernel::shared_bytes(head_dim)), /*overlaps_previous=*/true},
      &params);
  return {out, lse};
}

}  // namespace sage
