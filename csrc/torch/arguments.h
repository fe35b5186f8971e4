// From PyTorch's tensors to what kernels take: checked sizes, strided views, instance names, the current stream.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/tensor_view.h"
#include "runtime/driver.h"
#include "torch/tensor.h"

namespace sage {

constexpr int64_t kLargestHeadDim = 256;  // of all kernels

// Sizes of one call, whatever the layout of its tensors.
struct AttentionShape {
  int32_t batch;
  int32_t q_heads;
  int32_t kv_heads;
  int32_t qo_len;
  int32_t kv_len;
  int32_t head_dim;    // of q and k
  int32_t v_head_dim;  // of v and the output
};

// Throws ValueError or TypeError for what would be unsafe to run.
AttentionShape check_attention(const Tensor& q, const Tensor& k, const Tensor& v, bool heads_first);

// cu_seqlens of packed sequences: int32, contiguous, on q's device. Their values are the device's and stay unread.
void check_cu_seqlens(const char* name, const Tensor& cu_seqlens, const Tensor& q);

TensorView view(const Tensor& tensor, bool heads_first);

// Whether the copy engine can read the tensor: aligned, and no dimension that repeats the same memory.
bool copy_engine_reads(const Tensor& tensor, bool heads_first);

// <stem>-d<head_dim>-<dtype>, as kernels.json spells them; head_dim is that of the smallest kernel that holds it.
int32_t kernel_head_dim(int32_t head_dim);
std::string instance_name(const char* stem, int32_t kernel_head_dim, const Tensor& tensor);

// PyTorch's current stream of the device.
runtime::CUstream current_stream(int device);

// A grid's first dimension; throws ValueError short of the hardware's 2^31 - 1.
uint32_t grid_size(int64_t blocks);

}  // namespace sage
