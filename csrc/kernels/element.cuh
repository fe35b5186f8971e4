// fp16 and bf16 elements of the caller's tensors: loading rows as float, rounding back.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cuda/std/type_traits>

#include "kernels/tensor_view.h"

namespace sage {

// Two elements as the bits of a word, the first in the low half.
template <typename Element>
struct Pair {
  static constexpr bool kHalf = cuda::std::is_same_v<Element, __half>;
  using Two = cuda::std::conditional_t<kHalf, __half2, __nv_bfloat162>;

  static __device__ __forceinline__ float2 unpack(uint32_t bits) {
    if constexpr (kHalf) {
      return __half22float2(two(bits));
    } else {
      return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
    }
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    if constexpr (kHalf) {
      return bits(__floats2half2_rn(low, high));
    } else {
      return bits(__floats2bfloat162_rn(low, high));
    }
  }
  static __device__ __forceinline__ uint32_t add(uint32_t x, uint32_t y) { return bits(__hadd2(two(x), two(y))); }
  // x * y + z, rounded once.
  static __device__ __forceinline__ uint32_t multiply_add(uint32_t x, uint32_t y, uint32_t z) { return bits(__hfma2(two(x), two(y), two(z))); }
  // The larger one of x, which is not negative, and |y|; NaN if either is.
  static __device__ __forceinline__ uint32_t larger_magnitude(uint32_t x, uint32_t y) { return bits(__hmax2_nan(two(x), __habs2(two(y)))); }

 private:
  static __device__ __forceinline__ const Two& two(const uint32_t& bits) { return reinterpret_cast<const Two&>(bits); }
  static __device__ __forceinline__ uint32_t bits(const Two& two) { return reinterpret_cast<const uint32_t&>(two); }
};

template <typename Element>
__device__ __forceinline__ Element* row_pointer(const TensorView& tensor, int batch, int head, int64_t token) {
  return static_cast<Element*>(tensor.data) + batch * tensor.batch_stride + head * tensor.head_stride +
         token * tensor.token_stride;
}

// The bits of N (4, 8 or 16) channels from `channel` on; those at or past head_dim read as 0. Nothing is computed with them
// here, so several loads can be in flight.
template <int N, typename Element>
__device__ __forceinline__ void load_channels(uint32_t (&bits)[N / 2], const Element* row, int channel, int head_dim,
                                              bool aligned16) {
  static_assert(N == 4 || N == 8 || N == 16);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) bits[i] = 0;
  if (aligned16) {
    if constexpr (N == 4) {
      if (channel < head_dim) *reinterpret_cast<uint2*>(bits) = *reinterpret_cast<const uint2*>(row + channel);
    } else {
#pragma unroll
      for (int i = 0; i < N; i += 8) {
        if (channel + i < head_dim) {
          *reinterpret_cast<uint4*>(bits + i / 2) = *reinterpret_cast<const uint4*>(row + channel + i);
        }
      }
    }
  } else {
    // The rare case, kept small: one element after the other is pushed in at the low end.
    const auto* source = reinterpret_cast<const uint16_t*>(row) + channel;
#pragma unroll 1
    for (int i = N - 1; i >= 0; --i) {
#pragma unroll
      for (int j = N / 2 - 1; j > 0; --j) bits[j] = __funnelshift_l(bits[j - 1], bits[j], 16);
      bits[0] = (bits[0] << 16) | (channel + i < head_dim ? source[i] : 0u);
    }
  }
}

// The same of Count rows, `row(i)` being the i-th: whether they are aligned is asked once.
template <int N, int Count, typename Row>
__device__ __forceinline__ void load_rows(uint32_t (&bits)[Count][N / 2], const Row& row, int channel, int head_dim,
                                          bool aligned16) {
  if (aligned16) {
#pragma unroll
    for (int i = 0; i < Count; ++i) load_channels<N>(bits[i], row(i), channel, head_dim, true);
  } else {
#pragma unroll
    for (int i = 0; i < Count; ++i) load_channels<N>(bits[i], row(i), channel, head_dim, false);
  }
}

template <typename Element, int N>
__device__ __forceinline__ void unpack(float (&x)[N], const uint32_t (&bits)[N / 2]) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const float2 pair = Pair<Element>::unpack(bits[i / 2]);
    x[i] = pair.x;
    x[i + 1] = pair.y;
  }
}

// What a magnitude is at least, so that the scale of zeros is positive.
constexpr float kSmallestMagnitude = 1e-14f;

// The unit in which numbers up to `magnitude` become integers up to 127: magnitude * by. At most 2^50, so that products of two of them
// and a score are numbers; what bfloat16 holds beyond is no less far from all else. Beside an infinite one
// nothing is left of the others' codes, and of its own not even the sign: such a unit is NaN, and all that is made of it.
__device__ __forceinline__ float scale_of(float magnitude, float by) {
  const float scale = magnitude * by;
  return !(magnitude < INFINITY) ? __int_as_float(0x7fffffff) : scale > 0x1p50f ? 0x1p50f : scale;
}

// x * factor, within [-127, 127], rounded to nearest even, as four signed bytes. Adding 1.5 * 2^23 leaves the rounded integer
// in the low mantissa bits: cheaper than the conversion instruction, which runs at an eighth of the rate.
__device__ __forceinline__ uint32_t pack_s8x4(const float (&x)[4], float factor) {
  uint32_t bits[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) bits[i] = __float_as_uint(__fmaf_rn(x[i], factor, 12582912.0f));
  return __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
}

}  // namespace sage
