#include "torch/arguments.h"

#include <limits>

#include "runtime/library.h"

namespace sage {

namespace {

constexpr int64_t kSizes = int64_t{1} << 30;  // that indices of 32 bits count, with room to add

void check_tensor(const char* name, const Tensor& tensor, const Tensor& q) {
  TORCH_CHECK_VALUE(tensor.dim() == 4, name, ": expected 4 dimensions, got ", tensor.dim());
  TORCH_CHECK_VALUE(tensor.device() == q.device(), name, ": expected device ", q.device(), " as q, got ",
                    tensor.device());
  TORCH_CHECK_TYPE(tensor.scalar_type() == q.scalar_type(), name, ": expected dtype ", q.scalar_type(),
                   " as q, got ", tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.stride(3) == 1 || tensor.size(3) == 1, name,
                    ": expected a contiguous last dimension, got stride ", tensor.stride(3));
}

}  // namespace

AttentionShape check_attention(const Tensor& q, const Tensor& k, const Tensor& v, bool heads_first) {
  TORCH_CHECK_TYPE(q.scalar_type() == kHalf || q.scalar_type() == kBFloat16,
                   "q: expected dtype float16 or bfloat16, got ", q.scalar_type());
  check_tensor("q", q, q);
  check_tensor("k", k, q);
  check_tensor("v", v, q);
  const int head_dimension = heads_first ? 1 : 2, token_dimension = heads_first ? 2 : 1;
  TORCH_CHECK_VALUE(k.sizes().slice(0, 3) == v.sizes().slice(0, 3), "v: expected the shape of k but for head_dim, ",
                    k.sizes(), ", got ", v.sizes());
  TORCH_CHECK_VALUE(k.size(0) == q.size(0) && k.size(3) == q.size(3), "k: expected batch ", q.size(0),
                    " and head_dim ", q.size(3), " as q, got ", k.sizes());
  TORCH_CHECK_VALUE(q.size(3) >= 1 && q.size(3) <= kLargestHeadDim, "q: expected head_dim 1 to ", kLargestHeadDim,
                    ", got ", q.size(3));
  TORCH_CHECK_VALUE(v.size(3) >= 1 && v.size(3) <= kLargestHeadDim, "v: expected head_dim 1 to ", kLargestHeadDim,
                    ", got ", v.size(3));
  const int64_t kv_heads = k.size(head_dimension);
  TORCH_CHECK_VALUE(kv_heads >= 1 && q.size(head_dimension) % kv_heads == 0, "k: expected heads that divide q's ",
                    q.size(head_dimension), ", got ", kv_heads);
  constexpr int64_t kMostSharers = std::numeric_limits<int32_t>::max() / 16;  // a sample's 16 rows are of some of them
  TORCH_CHECK_VALUE(q.size(head_dimension) / kv_heads <= kMostSharers, "q: expected at most ", kMostSharers, " heads for each of k, got ",
                    q.size(head_dimension), " for ", kv_heads);
  for (const Tensor* tensor : {&q, &k}) {
    for (const int64_t size : tensor->sizes()) {
      TORCH_CHECK_VALUE(size < kSizes, "expected sizes under 2^30, got ", tensor->sizes());
    }
  }
  const auto narrow = [](int64_t size) { return static_cast<int32_t>(size); };
  return {narrow(q.size(0)),
          narrow(q.size(head_dimension)),
          narrow(kv_heads),
          narrow(q.size(token_dimension)),
          narrow(k.size(token_dimension)),
          narrow(q.size(3)),
          narrow(v.size(3))};
}

void check_cu_seqlens(const char* name, const Tensor& cu_seqlens, const Tensor& q) {
  TORCH_CHECK_TYPE(cu_seqlens.scalar_type() == kInt, name, ": expected dtype int32, got ", cu_seqlens.scalar_type());
  TORCH_CHECK_VALUE(cu_seqlens.dim() == 1 && cu_seqlens.size(0) >= 1 && cu_seqlens.is_contiguous(), name,
                    ": expected a contiguous [sequences + 1], got ", cu_seqlens.sizes());
  TORCH_CHECK_VALUE(cu_seqlens.size(0) <= kSizes, name, ": expected sequences under 2^30, got ", cu_seqlens.sizes());
  TORCH_CHECK_VALUE(cu_seqlens.device() == q.device(), name, ": expected device ", q.device(), " as q, got ",
                    cu_seqlens.device());
}

TensorView view(const Tensor& tensor, bool heads_first) {
  // The stride of a dimension of size 1 says nothing and is never used.
  const auto stride = [&](int dimension) { return tensor.size(dimension) == 1 ? 0 : tensor.stride(dimension); };
  TensorView view{};
  view.data = tensor.data_ptr();
  view.batch_stride = stride(0);
  view.head_stride = stride(heads_first ? 1 : 2);
  view.token_stride = stride(heads_first ? 2 : 1);
  view.aligned16 = reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && tensor.size(3) % 8 == 0 &&
                   view.batch_stride % 8 == 0 && view.head_stride % 8 == 0 && view.token_stride % 8 == 0;
  return view;
}

bool copy_engine_reads(const Tensor& tensor, bool heads_first) {
  if (!view(tensor, heads_first).aligned16) return false;
  for (int dimension = 0; dimension < 3; ++dimension) {
    if (tensor.size(dimension) > 1 && tensor.stride(dimension) < 8) return false;
  }
  return true;
}

int32_t kernel_head_dim(int32_t head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }

std::string instance_name(const char* stem, int32_t kernel_head_dim, const Tensor& tensor) {
  std::string name;
  name.reserve(64);  // one allocation: every call makes this name, for each of its launches
  name.append(stem).append("-d").append(std::to_string(kernel_head_dim));
  return name.append(tensor.scalar_type() == kHalf ? "-fp16" : "-bf16");
}

runtime::CUstream current_stream(int device) {
  // Found at run time: linking PyTorch's CUDA library would tie this one to PyTorch builds with CUDA.
#ifdef _WIN32
  constexpr const char* kLibrary = "torch_cuda.dll";
#else
  constexpr const char* kLibrary = "libtorch_cuda.so";
#endif
  using GetStream = int32_t (*)(int32_t device, void** stream);
  static const auto get_stream = reinterpret_cast<GetStream>(runtime::find(kLibrary, "aoti_torch_get_current_cuda_stream"));
  void* stream = nullptr;
  TORCH_CHECK(get_stream(device, &stream) == 0, SAGE_PACKAGE ": no current stream on device ", device);
  return static_cast<runtime::CUstream>(stream);
}

uint32_t grid_size(int64_t blocks) {
  // Kernels that take one tile after the other count some beyond the last, in 32 bits.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 4096;
  TORCH_CHECK_VALUE(blocks <= kMost, "q, k, v: batch x heads x tokens is too large: ", blocks, " blocks of threads, at most ", kMost);
  return static_cast<uint32_t>(blocks);
}

}  // namespace sage
