// Tensors, errors and operators as PyTorch has them, of either of its C++ interfaces: ATen, which is good for one release series, or
// LibTorch's stable ABI, for every release from 2.9 on. Each header has all of this, in namespace sage; nothing else includes PyTorch.
//
//   Tensor            dim, size, stride, sizes, strides, numel, element_size, data_ptr, scalar_type, device, get_device, defined,
//                     is_contiguous, as_strided, copy_, zero_, fill_: what at::Tensor does under these names
//   ScalarType        kByte, kInt, kHalf, kBFloat16, kFloat, kBool
//   IntArrayRef       sizes or strides
//   empty, empty_strided   a tensor on another one's device
//   register_operators
//   TORCH_CHECK_VALUE, TORCH_CHECK_TYPE   throw what Python sees as ValueError and TypeError; as RuntimeError with the stable ABI
#pragma once

// Whose tensors operators are for. Tests have them compute on the CPU's.
#ifndef SAGE_DEVICE
#define SAGE_DEVICE "CUDA"
#endif

#ifdef SAGE_STABLE_ABI
#include "torch/abi/stable.h"
#else
#include "torch/abi/aten.h"
#endif
