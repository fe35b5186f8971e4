// Shared memory: addresses, loads and stores.
#pragma once

#include "kernels/tensor_view.h"

namespace sage::ptx {

// What the launch asks for.
__device__ __forceinline__ uint8_t* dynamic_shared() {
  extern __shared__ uint8_t memory[];
  return memory;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void store_shared_16(uint32_t shared_destination, const uint32_t (&bits)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(shared_destination), "r"(bits[0]), "r"(bits[1]),
               "r"(bits[2]), "r"(bits[3])
               : "memory");
}

__device__ __forceinline__ void store_shared_word(uint32_t shared_destination, uint32_t bits) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(shared_destination), "r"(bits) : "memory");
}

__device__ __forceinline__ void store_shared_float(uint32_t shared_destination, float value) {
  asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(shared_destination), "f"(value) : "memory");
}

__device__ __forceinline__ float load_shared_float(uint32_t shared_source) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(value) : "r"(shared_source) : "memory");
  return value;
}

__device__ __forceinline__ float2 load_shared_float2(uint32_t shared_source) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(value.x), "=f"(value.y) : "r"(shared_source) : "memory");
  return value;
}

// N words of 4 bytes.
template <int N>
__device__ __forceinline__ void load_shared_words(uint32_t (&words)[N], uint32_t shared_source) {
  static_assert(N == 1 || N == 2 || N == 4);
  if constexpr (N == 1) {
    asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(words[0]) : "r"(shared_source) : "memory");
  } else if constexpr (N == 2) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];\n" : "=r"(words[0]), "=r"(words[1]) : "r"(shared_source) : "memory");
  } else {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_source)
                 : "memory");
  }
}

// 16 bits, without sign.
__device__ __forceinline__ uint32_t load_shared_u16(uint32_t shared_source) {
  uint32_t value;
  asm volatile("{\n.reg .u16 half;\nld.shared.u16 half, [%1];\ncvt.u32.u16 %0, half;\n}\n" : "=r"(value) : "r"(shared_source) : "memory");
  return value;
}

}  // namespace sage::ptx
