// The four lanes that hold a row of a fragment.
#pragma once

namespace sage {

// One number of each: op(op(·, ·), op(·, ·)), in all four.
template <typename T, typename Op>
__device__ __forceinline__ T reduce_quad(T x, const Op& op) {
  x = op(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return op(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

template <typename T>
__device__ __forceinline__ T sum_of_quad(T x) {
  return reduce_quad(x, [](T a, T b) { return a + b; });
}

__device__ __forceinline__ float max_of_quad(float x) {
  return reduce_quad(x, [](float a, float b) { return fmaxf(a, b); });
}

// Whether it holds in some lane of those that share a row.
__device__ __forceinline__ bool any_of_row(bool x) { return (__ballot_sync(0xffffffffu, x) >> (threadIdx.x % 32 & ~3) & 15) != 0; }

}  // namespace sage
