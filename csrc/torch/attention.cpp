#include "torch/attention.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "kernels/attention/sm80_qk_int8_pv_f16.h"
#include "kernels/attention/sm90_qk_int8_pv_f16.h"
#include "kernels/quant/quant_k_int8.h"
#include "runtime/kernel_store.h"
#include "runtime/tensor_map.h"
#include "torch/arguments.h"

namespace sage {

namespace {

constexpr double kLog2E = 1.4426950408889634;

struct Outputs {
  at::Tensor out;
  at::Tensor lse;  // empty where it is not wanted
};

Outputs allocate_outputs(const at::Tensor& q, const AttentionShape& shape, bool return_lse) {
  const auto options = q.options().dtype(at::kFloat);
  return {at::empty(q.sizes(), q.options()),
          return_lse ? at::empty({shape.batch, shape.q_heads, shape.qo_len}, options) : at::empty({0}, options)};
}

float* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() && tensor.numel() > 0 ? static_cast<float*>(tensor.data_ptr()) : nullptr;
}

struct QuantisedK {
  at::Tensor int8;
  at::Tensor scale;
  at::Tensor mean;  // undefined without smoothing
};

QuantisedK quantise_k(const at::Tensor& k, const AttentionShape& shape, bool smooth_k, runtime::CUstream stream) {
  const int32_t head_dim = kernel_head_dim(shape.head_dim);
  const int64_t heads = int64_t{shape.batch} * shape.kv_heads;
  const int64_t blocks = QuantKInt8::blocks(shape.kv_len);
  QuantisedK result;
  result.int8 = at::empty({heads, blocks * QuantKInt8::kBlockN, head_dim}, k.options().dtype(at::kChar));
  result.scale = at::empty({heads, blocks, QuantKInt8::kScales}, k.options().dtype(at::kFloat));
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
                                      stream, grid_size(heads * QuantKInt8::tiles(shape.kv_len)), QuantKInt8::kThreads, 0,
                                      /*overlaps_previous=*/false},
                                     &params);
  return result;
}

// What both attention kernels' parameters have in common.
template <typename Params>
Params common_params(const at::Tensor& q, const at::Tensor& v, const QuantisedK& k, const Outputs& outputs,
                     const AttentionShape& shape, bool is_causal, double sm_scale) {
  Params params{};
  params.q = view(q, shape.heads_first);
  params.v = view(v, shape.heads_first);
  params.out = view(outputs.out, shape.heads_first);
  params.k_int8 = static_cast<const int8_t*>(k.int8.data_ptr());
  params.k_scale = static_cast<const float*>(k.scale.data_ptr());
  params.k_mean = data_or_null(k.mean);
  params.lse = data_or_null(outputs.lse);
  params.q_heads = shape.q_heads;
  params.kv_heads = shape.kv_heads;
  params.qo_len = shape.qo_len;
  params.kv_len = shape.kv_len;
  params.head_dim = shape.head_dim;
  params.causal = is_causal ? 1 : 0;
  params.scale_log2 = static_cast<float>(sm_scale * kLog2E);
  return params;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> qk_int8_pv_f16(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                  c10::string_view tensor_layout, bool is_causal, double sm_scale,
                                                  bool smooth_k, bool return_lse, c10::string_view kernel) {
  TORCH_CHECK_VALUE(kernel == "auto" || kernel == "sm80" || kernel == "sm90",
                    "kernel: expected 'auto', 'sm80' or 'sm90', got '", kernel, "'");
  const AttentionShape shape = check_attention(q, k, v, tensor_layout, /*largest_head_dim=*/128);
  const int32_t head_dim = kernel_head_dim(shape.head_dim);
  const Outputs outputs = allocate_outputs(q, shape, return_lse);
  if (outputs.out.numel() == 0) return {outputs.out, outputs.lse};

  const int device = q.get_device();
  runtime::KernelStore& store = runtime::KernelStore::get();
  const bool hopper = store.architecture(device) == "sm_90a";
  TORCH_CHECK_VALUE(hopper || kernel != "sm90", "kernel: 'sm90' runs on compute capability 9.0 only, and here is ",
                    store.architecture(device));
  const runtime::CUstream stream = current_stream(device);
  const QuantisedK quantised = quantise_k(k, shape, smooth_k, stream);

  const auto blocks_of = [&](int64_t rows) {
    return grid_size((shape.qo_len + rows - 1) / rows * shape.q_heads * int64_t{shape.batch});
  };
  if (hopper && kernel != "sm80") {
    using Kernel = Sm90QkInt8PvF16;
    auto params = common_params<Kernel::Params>(q, v, quantised, outputs, shape, is_causal, sm_scale);
    params.batch = shape.batch;
    params.v_mapped = copy_engine_reads(v, params.v) ? 1 : 0;
    if (params.v_mapped) {
      params.v_map = runtime::encode_tensor_map(device, params.v, shape.batch, shape.kv_heads, shape.kv_len,
                                                shape.head_dim, Kernel::tile_n(head_dim));
    }
    const uint32_t multiprocessors = static_cast<uint32_t>(store.multiprocessors(device));
    store.launch({instance_name("sm90_qk_int8_pv_f16", head_dim, q), "sm90_qk_int8_pv_f16", device, stream,
                  std::min(blocks_of(Kernel::kBlockM), multiprocessors), Kernel::kThreads,
                  static_cast<uint32_t>(Kernel::shared_bytes(head_dim)), /*overlaps_previous=*/true},
                 &params);
  } else {
    using Kernel = Sm80QkInt8PvF16;
    auto params = common_params<Kernel::Params>(q, v, quantised, outputs, shape, is_causal, sm_scale);
    store.launch({instance_name("sm80_qk_int8_pv_f16", head_dim, q), "sm80_qk_int8_pv_f16", device, stream,
                  blocks_of(Kernel::kBlockM), Kernel::kThreads, static_cast<uint32_t>(Kernel::shared_bytes(head_dim)),
                  /*overlaps_previous=*/true},
                 &params);
  }
  return {outputs.out, outputs.lse};
}

}  // namespace sage
