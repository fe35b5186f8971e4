// What tests/ptx_to_cpp.py makes of PTX is C++ that uses this: registers without a type, and instructions that are more than an operator.
#pragma once

#include <cmath>
#include <limits>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "gpu.h"
#include "kernels/ptx/cluster.cuh"
#include "kernels/ptx/cp_async.cuh"
#include "kernels/ptx/float8.cuh"
#include "kernels/ptx/float4.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/ldmatrix.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/mma_sync.cuh"
#include "kernels/ptx/movmatrix.cuh"
#include "kernels/ptx/shared.cuh"

namespace ptx_code {

using sage::ptx::cluster_address;
using sage::ptx::cluster_index;
using sage::ptx::cluster_rank;
using sage::ptx::cluster_size;

union Register8 { uint8_t b8, u8; int8_t s8; };
union Register16 { uint16_t b16, u16; int16_t s16; };
union Register32 { uint32_t b32, u32, f16x2, bf16x2; int32_t s32; float f32; };
union Register64 { uint64_t b64, u64; int64_t s64; double f64; };

// Before anything is written to them, registers hold NaN.
template <typename Register, size_t N>
void unwritten(Register (&registers)[N]) { std::memset(registers, sizeof(Register) == 1 ? 0 : 255, sizeof registers); }

// Variables in shared memory, of which there is one block's at a time, lie at addresses of their own.
constexpr uint32_t kStaticBase = 1u << 31;
alignas(1024) inline uint8_t static_memory[48 * 1024];
inline const void* const unwritten_memory = std::memset(static_memory, 255, sizeof static_memory);

inline uint8_t* shared_at(uint32_t address, uint32_t bytes) {
  if (address < kStaticBase) return gpu::at(address, bytes);
  if (address - kStaticBase + bytes > sizeof static_memory) gpu::fail("access to shared memory past all variables");
  if (address % bytes != 0) gpu::fail("misaligned access of " + std::to_string(bytes) + " bytes to a shared variable");
  return static_memory + (address - kStaticBase);
}
inline uint8_t* generic_at(uint64_t address, uint32_t bytes) {
  if (address % bytes != 0) gpu::fail("misaligned access of " + std::to_string(bytes) + " bytes");
  return reinterpret_cast<uint8_t*>(address);
}
template <typename T>
T load(const uint8_t* from) {
  T x;
  std::memcpy(&x, from, sizeof(T));
  return x;
}
template <typename T>
void store(uint8_t* to, T x) { std::memcpy(to, &x, sizeof(T)); }

template <typename T>
T shl(T x, uint32_t by) { return by >= 8 * sizeof(T) ? 0 : x << by; }
template <typename T>
T shr(T x, uint32_t by) {
  constexpr uint32_t kMost = 8 * sizeof(T) - 1;
  return by > kMost ? (x < 0 ? -1 : 0) : x >> by;
}
template <typename T>
T divided(T x, T y) { return y == 0 ? -1 : x / y; }
template <typename T>
T remainder(T x, T y) { return y == 0 ? x : x % y; }
inline uint32_t high_product(uint32_t x, uint32_t y) { return __umulhi(x, y); }
inline int32_t high_product(int32_t x, int32_t y) { return static_cast<int64_t>(x) * y >> 32; }
inline uint64_t high_product(uint64_t x, uint64_t y) { return static_cast<unsigned __int128>(x) * y >> 64; }
inline uint32_t reversed(uint32_t x) {
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= (x >> i & 1) << (31 - i);
  return bits;
}
inline uint32_t leading_zeros(uint32_t x) { return x == 0 ? ~0u : __builtin_clz(x); }  // bfind.shiftamt
inline uint32_t insert(uint32_t bits, uint32_t into, uint32_t at, uint32_t count) {
  const uint32_t mask = (count >= 32 ? ~0u : (1u << count) - 1) << at;
  return (into & ~mask) | (bits << at & mask);
}
inline uint32_t permute(uint32_t x, uint32_t y, uint32_t selector) {
  uint32_t bits = __byte_perm(x, y, selector);
  for (int i = 0; i < 4; ++i) {  // bit 3 repeats the byte's sign
    if (selector >> 4 * i & 8) bits = (bits & ~(255u << 8 * i)) | (bits >> 8 * i & 128 ? 255u << 8 * i : 0u);
  }
  return bits;
}
// Toward the type's ends, and 0 for NaN.
template <typename T>
T to_integer(double x) {
  using Limits = std::numeric_limits<T>;
  if (x != x) return 0;
  return x <= double(Limits::min()) ? Limits::min() : x >= double(Limits::max()) ? Limits::max() : static_cast<T>(x);
}

inline float half(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
inline uint32_t halves(float low, float high) { return same_bits<uint32_t>(__floats2half2_rn(low, high)); }
inline uint32_t bfloats(float low, float high) { return same_bits<uint32_t>(__floats2bfloat162_rn(low, high)); }
inline uint16_t to_e4m3x2(float low, float high) { return sage::ptx::to_e4m3(low) | sage::ptx::to_e4m3(high) << 8; }
inline uint32_t from_e4m3x2(uint16_t codes) { return halves(sage::ptx::from_e4m3(codes), sage::ptx::from_e4m3(codes >> 8)); }
inline uint8_t to_e2m1x2(float low, float high) {
  const float x[8] = {low, high};
  return sage::ptx::pack_e2m1x8(x);
}
inline uint32_t from_e2m1x2(uint8_t codes) {
  uint32_t pairs[4];
  sage::ptx::unpack_e2m1x8(pairs, codes);
  return pairs[0];
}

// A function of two numbers each.
template <typename Pair, typename Op, typename... Words>
uint32_t pairwise(const Op& op, Words... words) { return same_bits<uint32_t>(op(same_bits<Pair>(words)...)); }

}  // namespace ptx_code
