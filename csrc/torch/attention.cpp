#include "torch/attention.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <vector>

#include "kernels/attention/sm80_qk_int8_pv_f16.h"
#include "kernels/attention/sm90_qk_int8_pv_f16.h"
#include "kernels/quant/quant_k_int8.h"
#include "runtime/kernel_store.h"
#include "runtime/tensor_map.h"
#include "torch/arguments.h"

namespace sage {

namespace {

constexpr double kLog2E = 1.4426950408889634;

// What an attention kernel is launched with and what it can do.
struct AttentionKernel {
  c10::string_view name;
  int32_t block_m;
  int32_t threads;
  int (*shared_bytes)(int head_dim);
  int32_t largest_head_dim;
  const char* only_on;  // the one architecture it is compiled for; null: any
  bool persistent;      // one block a multiprocessor, each takes tile after tile
};

constexpr AttentionKernel kAttentionKernels[] = {
    {"sm80_qk_int8_pv_f16", Sm80QkInt8PvF16::kBlockM, Sm80QkInt8PvF16::kThreads, &Sm80QkInt8PvF16::shared_bytes, 128, nullptr,
     false},
    {"sm90_qk_int8_pv_f16", Sm90QkInt8PvF16::kBlockM, Sm90QkInt8PvF16::kThreads, &Sm90QkInt8PvF16::shared_bytes, 128,
     "sm_90a", true},
};

const AttentionKernel& attention_kernel(c10::string_view name) {
  std::string names;
  for (const AttentionKernel& kernel : kAttentionKernels) {
    if (kernel.name == name) return kernel;
    names += (names.empty() ? "" : ", ") + std::string(kernel.name);
  }
  TORCH_CHECK_VALUE(false, "kernel: expected one of ", names, "; got '", name, "'");
}

struct Outputs {
  at::Tensor out;
  at::Tensor lse;  // empty where it is not wanted
};

Outputs allocate_outputs(const at::Tensor& q, const AttentionShape& shape, bool return_lse) {
  std::vector<int64_t> sizes = q.sizes().vec();
  sizes.back() = shape.v_head_dim;
  const auto options = q.options().dtype(at::kFloat);
  return {at::empty(sizes, q.options()),
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
  params.k_mean = data_or_null(result.mean);
  params.kv_heads = shape.kv_heads;
  params.kv_len = shape.kv_len;
  params.head_dim = shape.head_dim;
  runtime::KernelStore::get().launch({instance_name("quant_k_int8", head_dim, k), "quant_k_int8", k.get_device(),
                                      stream, grid_size(heads * QuantKInt8::tiles(shape.kv_len)), QuantKInt8::kThreads, 0,
                                      /*overlaps_previous=*/false},
                                     &params);
  return result;
}

AttentionParams attention_params(const at::Tensor& q, const at::Tensor& v, const QuantisedK& k, const Outputs& outputs,
                                 const AttentionShape& shape, bool is_causal, double sm_scale) {
  AttentionParams params{};
  params.q = view(q, shape.heads_first);
  params.v = view(v, shape.heads_first);
  params.out = view(outputs.out, shape.heads_first);
  params.k_int8 = static_cast<const int8_t*>(k.int8.data_ptr());
  params.k_scale = static_cast<const float*>(k.scale.data_ptr());
  params.k_mean = data_or_null(k.mean);
  params.lse = data_or_null(outputs.lse);
  params.batch = shape.batch;
  params.q_heads = shape.q_heads;
  params.kv_heads = shape.kv_heads;
  params.qo_len = shape.qo_len;
  params.kv_len = shape.kv_len;
  params.head_dim = shape.head_dim;
  params.v_head_dim = shape.v_head_dim;
  params.causal = is_causal ? 1 : 0;
  params.scale_log2 = static_cast<float>(sm_scale * kLog2E);
  return params;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                             const std::optional<at::Tensor>& attn_mask, c10::string_view tensor_layout,
                                             bool is_causal, double sm_scale, bool smooth_k, bool smooth_v,
                                             bool return_lse, c10::string_view kernel_name) {
  static_cast<void>(smooth_v);  // for kernels that round V
  const AttentionKernel& kernel = attention_kernel(kernel_name);
  const AttentionShape shape = check_attention(q, k, v, tensor_layout, kernel.largest_head_dim);
  TORCH_CHECK_VALUE(!attn_mask.has_value(), "attn_mask: the kernel ", kernel.name, " takes none");
  TORCH_CHECK_VALUE(shape.v_head_dim == shape.head_dim, "v: the kernel ", kernel.name, " wants the head_dim of q, ",
                    shape.head_dim, ", got ", shape.v_head_dim);
  const Outputs outputs = allocate_outputs(q, shape, return_lse);
  if (outputs.out.numel() == 0) return {outputs.out, outputs.lse};

  const int device = q.get_device();
  runtime::KernelStore& store = runtime::KernelStore::get();
  const std::string architecture = store.architecture(device);
  TORCH_CHECK_VALUE(kernel.only_on == nullptr || architecture == kernel.only_on, "kernel: ", kernel.name, " runs on ",
                    kernel.only_on == nullptr ? "" : kernel.only_on, " only, and here is ", architecture);
  const runtime::CUstream stream = current_stream(device);
  const QuantisedK quantised = quantise_k(k, shape, smooth_k, stream);
  AttentionParams params = attention_params(q, v, quantised, outputs, shape, is_causal, sm_scale);

  const int32_t head_dim = kernel_head_dim(shape.head_dim);
  const std::string name(kernel.name);
  const int64_t row_blocks = (shape.qo_len + kernel.block_m - 1) / kernel.block_m;
  runtime::Launch launch{instance_name(kernel.name, head_dim, q),
                         name.c_str(),
                         device,
                         stream,
                         grid_size(row_blocks * shape.q_heads * shape.batch),
                         static_cast<uint32_t>(kernel.threads),
                         static_cast<uint32_t>(kernel.shared_bytes(head_dim)),
                         /*overlaps_previous=*/true};
  if (!kernel.persistent) {
    store.launch(launch, &params);
  } else {
    using Kernel = Sm90QkInt8PvF16;
    Kernel::Params mapped{};
    static_cast<AttentionParams&>(mapped) = params;
    mapped.v_mapped = copy_engine_reads(v, params.v) ? 1 : 0;
    if (mapped.v_mapped) {
      mapped.v_map = runtime::encode_tensor_map(device, params.v, shape.batch, shape.kv_heads, shape.kv_len,
                                                shape.v_head_dim, Kernel::tile_n(head_dim));
    }
    launch.grid = std::min(launch.grid, static_cast<uint32_t>(store.multiprocessors(device)));
    store.launch(launch, &mapped);
  }
  return {outputs.out, outputs.lse};
}

}  // namespace sage
