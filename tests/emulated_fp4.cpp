// csrc/kernels/ptx/float4.cuh with its instructions emulated, run on the CPU: a thread for each lane of a warp. Reads products from the
// standard input and writes them to the standard output, both as 32-bit words: of each lane A, B, C, the scales; of each lane D. Before
// them stands how many numbers follow that are to become codes, and these; the codes and what they stand for are written first.
#include <pthread.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __noinline__

struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(double x, double y, double z, double w) { return {float(x), float(y), float(z), float(w)}; }
inline uint32_t __float_as_uint(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }
inline float __int_as_float(int32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
// Of small multiples of a half.
inline uint16_t half_bits(float x) {
  int exponent;
  const float mantissa = std::frexp(std::fabs(x), &exponent);
  const int magnitude = x == 0.0f ? 0 : ((exponent + 14) << 10) + static_cast<int>((mantissa * 2.0f - 1.0f) * 1024.0f);
  return static_cast<uint16_t>(magnitude | (std::signbit(x) ? 0x8000 : 0));
}
struct __half2 { uint16_t low, high; };
inline __half2 __floats2half2_rn(float low, float high) { return {half_bits(low), half_bits(high)}; }

thread_local struct { unsigned x; } threadIdx;
static pthread_barrier_t warp;
static uint32_t exchanged[32];
inline uint32_t __shfl_sync(uint32_t, uint32_t value, int lane) {
  exchanged[threadIdx.x] = value;
  pthread_barrier_wait(&warp);
  const uint32_t answer = exchanged[lane & 31];
  pthread_barrier_wait(&warp);
  return answer;
}

#define SAGE_EMULATE_FP4
#include "kernels/ptx/float4.cuh"

template <typename T>
static bool take(T* to, size_t count) { return std::fread(to, 4, count, stdin) == count; }

int main() {
  uint32_t numbers;
  if (!take(&numbers, 1)) return 1;
  for (uint32_t i = 0; i < numbers; i += 8) {
    float x[8];
    if (!take(x, 8)) return 1;
    const uint32_t codes = sage::ptx::pack_e2m1x8(x);
    uint32_t pairs[4];
    sage::ptx::unpack_e2m1x8(pairs, codes);
    std::fwrite(&codes, 4, 1, stdout);
    std::fwrite(pairs, 4, 4, stdout);
  }
  struct Lane { uint32_t a[4], b[2]; float c[4]; uint32_t scale_a, scale_b; };
  static_assert(sizeof(Lane) == 48);
  pthread_barrier_init(&warp, nullptr, 32);
  std::vector<Lane> lanes(32);
  float d[32][4];
  while (take(reinterpret_cast<uint32_t*>(lanes.data()), 32 * 12)) {
    std::vector<std::thread> threads;
    for (unsigned lane = 0; lane < 32; ++lane) {
      threads.emplace_back([&, lane] {
        threadIdx.x = lane;
        const Lane& l = lanes[lane];
        sage::ptx::mma_m16n8k64_e2m1(d[lane], l.a, l.b[0], l.b[1], l.c, l.scale_a, l.scale_b);
      });
    }
    for (std::thread& thread : threads) thread.join();
    std::fwrite(d, 4, 128, stdout);
  }
  return 0;
}
