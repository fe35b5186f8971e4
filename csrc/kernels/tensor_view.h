// Plain-old-data shared by host and device: how a kernel sees a tensor of PyTorch's.
// Fixed-width types only: one cubin serves hosts whose `long` differ (Linux, Windows).
#pragma once

#ifdef __CUDACC__
#include <cuda/std/cstdint>
#else
#include <cstdint>
#endif

#ifdef __CUDACC__
#define SAGE_HOST_DEVICE __host__ __device__
#else
#define SAGE_HOST_DEVICE
#endif

namespace sage {

#ifdef __CUDACC__
using cuda::std::int32_t;
using cuda::std::int64_t;
using cuda::std::int8_t;
using cuda::std::uint16_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;
using cuda::std::uint8_t;
#else
using std::int32_t;
using std::int64_t;
using std::int8_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;
#endif

// A [batch, head, token, channel] tensor with unit stride in its last dimension. Strides count elements and are
// 64-bit: a video model's tensors pass 2^31 elements.
struct TensorView {
  void* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t token_stride;
  // Every row starts on 16 bytes and holds a multiple of 16 bytes: the kernel may use 16-byte accesses.
  int32_t aligned16;
};

// The copy engine's description of a tensor (CUtensorMap), made by the driver: runtime/tensor_map.h.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

}  // namespace sage
