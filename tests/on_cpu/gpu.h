// What kernels use of CUDA, on the CPU: a block of threads after the other, a fiber for each of its threads, which take turns where they wait
// for each other. So device code runs as it is, but for csrc/kernels/ptx/, in whose place stand the headers beside this one.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

using std::max;
using std::min;

struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(double x, double y, double z, double w) { return {float(x), float(y), float(z), float(w)}; }

namespace gpu {

struct Index { unsigned x; };

// What the lanes of a warp tell each other. Two sets of places: nobody is more than one exchange ahead.
struct Warp {
  alignas(16) unsigned char places[2][32][64];
  int arrived[2];
  int generation;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  Index index;
  Warp* warp;
  int set;
  bool done;
};

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Fiber* current;
inline ucontext_t scheduler;
inline Index block;
inline int arrived, generation, any[2];
inline void (*kernel)(const void* params);
inline const void* params;

inline void wait() { swapcontext(&current->context, &scheduler); }

// Answers with what all lanes gave.
template <typename T>
struct Exchanged {
  const unsigned char (*places)[64];
  T operator[](int lane) const {
    T x;
    std::memcpy(&x, places[lane & 31], sizeof(T));
    return x;
  }
};
template <typename T>
Exchanged<T> exchange(const T& value) {
  static_assert(sizeof(T) <= 64);
  Warp& warp = *current->warp;
  const int set = current->set, before = warp.generation;
  current->set ^= 1;
  std::memcpy(warp.places[set][current->index.x % 32], &value, sizeof(T));
  if (++warp.arrived[set] == 32) {
    warp.arrived[set] = 0;
    ++warp.generation;
  } else {
    while (warp.generation == before) wait();
  }
  return {warp.places[set]};
}

inline int barrier(bool x) {
  const int before = generation;
  any[before % 2] |= x;
  if (++arrived == static_cast<int>(fibers.size())) {
    arrived = 0;
    any[(before + 1) % 2] = 0;
    ++generation;
  } else {
    while (generation == before) wait();
  }
  return any[before % 2];
}

inline void start() {
  kernel(params);
  current->done = true;
  wait();
}

inline void launch(void (*entry)(const void*), const void* argument, int grid, int threads) {
  kernel = entry;
  params = argument;
  fibers.resize(threads);
  warps.resize(threads / 32);
  for (block.x = 0; block.x < static_cast<unsigned>(grid); ++block.x) {
    arrived = generation = any[0] = any[1] = 0;
    for (Warp& warp : warps) warp.arrived[0] = warp.arrived[1] = warp.generation = 0;
    for (int i = 0; i < threads; ++i) {
      Fiber& fiber = fibers[i];
      fiber.stack.resize(1 << 18);
      fiber.index.x = i;
      fiber.warp = &warps[i / 32];
      fiber.set = 0;
      fiber.done = false;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      makecontext(&fiber.context, start, 0);
    }
    for (bool left = true; left;) {
      left = false;
      for (Fiber& fiber : fibers) {
        if (fiber.done) continue;
        left = true;
        current = &fiber;
        swapcontext(&scheduler, &fiber.context);
      }
    }
  }
}

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "%s by thread %u of block %u\n", what, current->index.x, block.x);
  std::abort();
}

inline uint8_t* shared = nullptr;  // where shared memory starts
// An access to it, which must be aligned.
inline uint8_t* at(uint32_t address, uint32_t alignment) {
  if (address % alignment) fail("misaligned access to shared memory");
  return shared + address;
}

}  // namespace gpu

#define threadIdx (gpu::current->index)
#define blockIdx (gpu::block)

inline void __syncthreads() { gpu::barrier(false); }
inline int __syncthreads_or(int x) { return gpu::barrier(x != 0); }
inline void __syncwarp() { gpu::exchange(0); }
template <typename T>
T __shfl_xor_sync(uint32_t, T x, int mask) { return gpu::exchange(x)[(threadIdx.x % 32) ^ mask]; }
template <typename T>
T __shfl_sync(uint32_t, T x, int lane) { return gpu::exchange(x)[lane]; }
inline uint32_t __ballot_sync(uint32_t, bool x) {
  const auto all = gpu::exchange(static_cast<int>(x));
  uint32_t bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= static_cast<uint32_t>(all[lane]) << lane;
  return bits;
}
inline bool __any_sync(uint32_t mask, bool x) { return __ballot_sync(mask, x) != 0; }

template <typename To, typename From>
To same_bits(const From& x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof(To));
  return y;
}
inline uint32_t __float_as_uint(float x) { return same_bits<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return same_bits<float>(x); }
inline float __int_as_float(int32_t x) { return same_bits<float>(x); }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(y) << 32 | x;
  uint32_t bits = 0;
  for (int i = 0; i < 4; ++i) bits |= static_cast<uint32_t>(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return bits;
}
inline uint32_t __umulhi(uint32_t x, uint32_t y) { return static_cast<uint64_t>(x) * y >> 32; }
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, int shift) {
  return ((static_cast<uint64_t>(high) << 32 | low) << shift) >> 32;
}
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline void* __cvta_shared_to_generic(uint32_t address) { return gpu::shared + address; }
