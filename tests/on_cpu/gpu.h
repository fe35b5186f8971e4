// What kernels use of CUDA, on the CPU: a block of threads after the other, a fiber for each of its threads, which take turns where they wait
// for each other. So device code runs as it is, but for csrc/kernels/ptx/, in whose place stand the headers beside this one.
//
// Whatever order the GPU may choose must do: with a seed, warps and lanes come in random order, a warp going on until it can go no
// further. Faults end the launch, and the kernel's caller is told: accesses outside of shared memory, misaligned ones, and waiting for ever.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
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

constexpr int kLanes = 32;
constexpr size_t kStackBytes = 1 << 18;

struct Index { unsigned x; };

// What the lanes of a warp tell each other. Two sets of places: nobody is more than one exchange ahead.
struct Warp {
  alignas(16) unsigned char given[2][kLanes][64];
  alignas(16) unsigned char made[2][kLanes][64];
  int arrived[2];
  int generation;
};

// 16 bytes on their way to shared memory.
struct Copy {
  uint8_t* destination;
  const void* source;  // null: zeros
};

struct Fiber {
  ucontext_t first;
  jmp_buf next;
  std::unique_ptr<char[]> stack;
  Index index;
  Warp* warp;
  int set;
  bool started, done;
  const int* waits_for;  // to be other than it was
  int was;
  std::vector<std::vector<Copy>> copies;  // groups of them, the last one not committed

  bool can_go_on() const { return !done && (waits_for == nullptr || *waits_for != was); }
};

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Fiber* current;
inline jmp_buf scheduler;
inline Index block;
inline int arrived, generation, any[2];
inline void (*kernel)(const void* params);
inline const void* params;
inline std::string failure;
inline bool in_order;
inline void (*previous)();  // runs the kernel before this one; null: it has run, or this one may not overlap it
inline std::minstd_rand random_numbers;

// Shared memory that the launch asks for. Addresses do not start at 0, which is none on a GPU.
constexpr uint32_t kSharedBase = 1024;
inline uint8_t* shared;
inline uint32_t shared_bytes;

[[noreturn]] inline void fail(const std::string& what) {
  failure = what + " by thread " + std::to_string(current->index.x) + " of block " + std::to_string(block.x);
  _longjmp(scheduler, 1);
}

// An access to it.
inline uint8_t* at(uint32_t address, uint32_t bytes) {
  if (address % bytes != 0) fail("misaligned access of " + std::to_string(bytes) + " bytes to shared memory");
  if (address < kSharedBase || address - kSharedBase + uint64_t{bytes} > shared_bytes) {
    fail("access to byte " + std::to_string(int64_t{address} - kSharedBase) + " of " + std::to_string(shared_bytes) + " of shared memory");
  }
  return shared + (address - kSharedBase);
}

// Goes on when it has changed.
inline void wait(const int& generation, int was) {
  current->waits_for = &generation;
  current->was = was;
  while (generation == was) {
    if (_setjmp(current->next) == 0) _longjmp(scheduler, 1);
  }
}

// What all lanes gave, or what was made of it.
template <typename T>
struct Exchanged {
  unsigned char (*places)[64];
  T operator[](int lane) const {
    T x;
    std::memcpy(&x, places[lane % kLanes], sizeof(T));
    return x;
  }
  void put(int lane, const T& x) { std::memcpy(places[lane], &x, sizeof(T)); }
};

// Of all lanes' values the last one makes what each is given back: make(given, made).
template <typename Made, typename Given, typename Make>
Made together(const Given& value, const Make& make) {
  static_assert(sizeof(Given) <= 64 && sizeof(Made) <= 64);
  Warp& warp = *current->warp;
  const int set = current->set, lane = current->index.x % kLanes, before = warp.generation;
  current->set ^= 1;
  Exchanged<Given>{warp.given[set]}.put(lane, value);
  Exchanged<Made> made{warp.made[set]};
  if (++warp.arrived[set] == kLanes) {
    make(Exchanged<Given>{warp.given[set]}, made);
    warp.arrived[set] = 0;
    ++warp.generation;
  } else {
    wait(warp.generation, before);
  }
  return made[lane];
}

// Answers with what all lanes gave.
template <typename T>
Exchanged<T> exchange(const T& value) {
  const int set = current->set;
  together<char>(value, [](auto, auto) {});
  return {current->warp->given[set]};
}

inline int barrier(bool x) {
  const int before = generation;
  any[before % 2] |= x;
  if (++arrived == static_cast<int>(fibers.size())) {
    arrived = 0;
    any[(before + 1) % 2] = 0;
    ++generation;
  } else {
    wait(generation, before);
  }
  return any[before % 2];
}

// Copies are made as late as they may be: when the thread waits for them.
inline void start_copy(uint32_t destination, const void* source, bool valid) {
  if (reinterpret_cast<uintptr_t>(source) % 16 != 0) fail("misaligned copy");
  current->copies.back().push_back({at(destination, 16), valid ? source : nullptr});
}
inline void commit_copies() { current->copies.emplace_back(); }
inline void wait_for_copies(size_t pending) {
  auto& groups = current->copies;
  while (groups.size() > pending + 1) {
    for (const Copy& copy : groups.front()) {
      if (copy.source == nullptr) std::memset(copy.destination, 0, 16);
      else std::memcpy(copy.destination, copy.source, 16);
    }
    groups.erase(groups.begin());
  }
}

// Until the kernel before has ended. It starts as late as it may: now.
inline void wait_for_previous() {
  if (previous != nullptr) std::exchange(previous, nullptr)();
}

inline void start() {
  kernel(params);
  if (current->copies.size() > 1 || !current->copies.back().empty()) fail("the end before copies have arrived");
  current->done = true;
  _longjmp(scheduler, 1);
}

inline void resume(Fiber& fiber) {
  current = &fiber;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.next, 1);
  fiber.started = true;
  setcontext(&fiber.first);
}

// A permutation of 0 to count - 1.
inline std::vector<int> an_order(int count) {
  std::vector<int> order(count);
  for (int i = 0; i < count; ++i) order[i] = i;
  if (!in_order) std::shuffle(order.begin(), order.end(), random_numbers);
  return order;
}

inline void run_block() {
  for (bool left = true; left && failure.empty();) {
    bool moved = false;
    left = false;
    for (const int warp : an_order(warps.size())) {
      const std::vector<int> lanes = an_order(kLanes);
      for (bool more = true; more;) {
        more = false;
        for (const int lane : lanes) {
          Fiber& fiber = fibers[warp * kLanes + lane];
          if (!fiber.can_go_on()) continue;
          resume(fiber);
          if (!failure.empty()) return;
          more = moved = true;
        }
      }
    }
    for (const Fiber& fiber : fibers) left |= !fiber.done;
    if (left && !moved) {
      current = &*std::find_if(fibers.begin(), fibers.end(), [](const Fiber& fiber) { return !fiber.done; });
      failure = "waiting for ever by thread " + std::to_string(current->index.x) + " of block " + std::to_string(block.x);
    }
  }
}

// Null, or what went wrong. `memory`, of so many bytes, is shared, and NaN before each block of threads. In order blocks come from the last one on:
// what starts last on a GPU, and may get by without a wait there, here finds the kernel before not run.
inline const char* launch(void (*entry)(const void*), const void* argument, int grid, int threads, uint8_t* memory, uint32_t bytes,
                          int seed, void (*run_previous)()) {
  kernel = entry;
  params = argument;
  previous = run_previous;
  shared = memory;
  shared_bytes = bytes;
  in_order = seed == 0;
  random_numbers.seed(seed);
  failure.clear();
  fibers.resize(threads);
  warps.resize(threads / kLanes);
  for (const int index : an_order(grid)) {
    block.x = in_order ? grid - 1 - index : index;
    arrived = generation = any[0] = any[1] = 0;
    std::memset(memory, 0xff, bytes);
    for (Warp& warp : warps) warp.arrived[0] = warp.arrived[1] = warp.generation = 0;
    for (int i = 0; i < threads; ++i) {
      Fiber& fiber = fibers[i];
      if (fiber.stack == nullptr) fiber.stack.reset(new char[kStackBytes]);
      fiber.index.x = i;
      fiber.warp = &warps[i / kLanes];
      fiber.set = 0;
      fiber.started = fiber.done = false;
      fiber.waits_for = nullptr;
      fiber.copies.assign(1, {});
      getcontext(&fiber.first);
      fiber.first.uc_stack.ss_sp = fiber.stack.get();
      fiber.first.uc_stack.ss_size = kStackBytes;
      makecontext(&fiber.first, start, 0);
    }
    run_block();
    if (!failure.empty()) return failure.c_str();
  }
  return nullptr;
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
  return gpu::together<uint32_t>(x, [](auto given, auto made) {
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= static_cast<uint32_t>(given[lane]) << lane;
    for (int lane = 0; lane < 32; ++lane) made.put(lane, bits);
  });
}
inline bool __any_sync(uint32_t mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline bool __all_sync(uint32_t mask, bool x) { return __ballot_sync(mask, !x) == 0; }

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
inline int __dp4a(int x, int y, int sum) {
  for (int i = 0; i < 32; i += 8) sum += static_cast<int8_t>(x >> i) * static_cast<int8_t>(y >> i);
  return sum;
}
// 0 for divisors beyond 2^126.
inline float __fdividef(float x, float y) { return std::fabs(y) > 0x1p126f && std::fabs(y) < INFINITY ? x * 0.0f : x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
template <typename T>
T __ldcs(const T* pointer) { return *pointer; }
inline void* __cvta_shared_to_generic(uint32_t address) { return gpu::at(address, 1); }
