// Arithmetic on float32, single instructions but for division; and what has the compiler keep a value, or find the lane anew.
#pragma once

namespace sage::ptx {

// 2^x; 0 for -infinity.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// log2(x)
__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// The square root of a number that is not negative.
__device__ __forceinline__ float sqrt(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, less than exactly; of numbers below 2^-126 infinity, beyond 2^126 zero.
__device__ __forceinline__ float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// x / y, less than exactly; of all y that are not subnormal. (__fdividef gives 0 where y is beyond 2^126.)
__device__ __forceinline__ float divide(float x, float y) { return __fdividef(x * 0.25f, y * 0.25f); }

// The larger one; NaN if either is NaN (fmaxf would drop it, and with it the sign that an input was bad).
__device__ __forceinline__ float max_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// The smaller one; NaN if either is.
__device__ __forceinline__ float min_nan(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;\n" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// No instruction: makes the compiler keep a value in its register rather than derive it again at each use.
template <typename T>
__device__ __forceinline__ void keep(T& value) {
  asm volatile("" : "+r"(value));
}

// The lane of the warp, read where it is asked for: no register need hold it, or what derives from it, until then.
__device__ __forceinline__ int lane_here() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

}  // namespace sage::ptx
