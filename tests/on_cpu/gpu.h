// What kernels use of CUDA, on the CPU: a cluster of blocks of threads (mostly one block) after the other, a fiber for each of its threads,
// which take turns where they wait for each other. So device code runs as it is, but for csrc/kernels/ptx/, in whose place stand the headers
// beside this one.
//
// Whatever order the GPU may choose must do: with a seed, warps and lanes come in random order, a warp mostly going on until it can go no
// further, and some warps, and lanes, are slow; what happens by itself, as copies do, happens when no thread, or none but slow ones, can go
// on. Faults end the launch, and the kernel's caller is told: accesses outside of shared memory, misaligned ones, lanes of a warp at different
// instructions, and waiting for ever.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "must_wait.h"
#include "races.h"

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
constexpr int kWarpgroup = 4 * kLanes;
constexpr size_t kStackBytes = 1 << 18;

struct Index { unsigned x; };

// What the lanes of a warp tell each other. Two sets of places: nobody is more than one exchange ahead.
struct Warp {
  alignas(16) unsigned char given[2][kLanes][64];
  alignas(16) unsigned char made[2][kLanes][64];
  const void* instruction[2];
  int arrived[2];
  int generation;
  races::Order order[2];
  int registers;  // of each lane
};

// Where threads wait until so many have come.
struct Gate {
  int arrived = 0, generation = 0;
  int any[2] = {};
  races::Order order = races::order();
};

// In shared memory.
struct Mbarrier {
  int arrivals, missing;  // in each phase, and yet to come in this one
  int64_t bytes;          // that are expected of copies
  int phase;              // how many have completed
  bool waited_for;        // the last of those
  const void* hidden_from_all_but;  // the thread that has initialised it, until its fence
  uint32_t number;
  races::Order order = races::order();
};

// What all warps of a warpgroup execute one after the other: a product, as it is for each of them, or what products are fenced, committed
// or waited for with.
struct InStep {
  void (*multiply)(int warp, size_t product);  // null: no product
  uint64_t descriptors[2];
  bool accumulate;
  const void* instruction;  // which it is else, and with which number

  bool operator==(const InStep& other) const {
    return multiply == other.multiply && descriptors[0] == other.descriptors[0] && descriptors[1] == other.descriptors[1] &&
           accumulate == other.accumulate && instruction == other.instruction;
  }
};

struct Block {
  Index index, size;
  unsigned rank;  // in its cluster
  uint8_t* shared;
  int living;     // threads that have not ended
  Gate gate;
  Gate named[16];
  int free_registers;
  std::map<uint32_t, Mbarrier> mbarriers;  // by address
  std::map<int, std::vector<InStep>> in_step;  // by a warpgroup's number
};

// Bytes on their way to shared memory.
struct Copy {
  uint8_t* destination;
  const void* source;
  int bytes, source_bytes;  // zeros beyond these
};

// A product of tensor cores that has been started, as a lane knows it.
struct Product {
  void (*multiply)(int warp, size_t product);
  uint32_t* d;        // not to be touched until it is done, nor is A
  const uint32_t* a;  // null: in shared memory
  uint64_t descriptors[2];  // of A there, and of B
  bool accumulate;
  const void* where;  // in the code
  races::Known known;
};

// Registers that products under way will write.
struct Accumulator {
  uint32_t* d;
  std::vector<uint32_t> values;  // so far
  int products;                  // under way
};

struct Fiber {
  ucontext_t first;
  jmp_buf next;
  std::unique_ptr<char[]> stack;
  Index index;
  Block* block;
  Warp* warp;
  int set;
  bool started, done, waited;  // for the launch before
  const int* waits_for;  // to be other than it was
  int was;
  std::vector<std::vector<Copy>> copies;  // groups of them, the last one not committed
  std::vector<std::vector<Product>> products;  // the same
  std::vector<Accumulator> accumulators;
  bool fenced;  // registers, for products that follow
  size_t in_step;  // instructions of its warpgroup that a warp has executed, in its first lane

  bool can_go_on() const { return !done && (waits_for == nullptr || *waits_for != was); }
};

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline std::vector<Block> blocks;  // of the cluster
inline Gate cluster_gate;
inline unsigned cluster;
inline Index grid_size;
inline std::vector<std::function<void()>> under_way;  // what happens by itself
inline const char* (*before)();  // makes the launch before this one, whose end this one need not have seen; null: it has been made
inline int ends_seen;            // of such launches
inline MustWait must_wait;
inline Fiber* current;
inline jmp_buf scheduler;
inline void (*kernel)(const void* params);
inline const void* params;
inline std::string failure;
inline bool in_order;
inline std::minstd_rand random_numbers;

// Shared memory that the launch asks for; a cluster's blocks have theirs one after the other. Addresses do not start at 0, which is none on
// a GPU, and say above of which block they are.
constexpr uint32_t kSharedBase = 1024, kMostShared = 227 * 1024;
constexpr int kMostBlocks = 8;  // of a cluster, on every GPU that has them
constexpr int kRankBit = 24;
inline uint8_t* shared;
inline uint32_t shared_bytes;

inline std::string name(const Fiber& fiber) {
  return " by thread " + std::to_string(fiber.index.x) + " of block " + std::to_string(fiber.block->index.x);
}
[[noreturn]] inline void fail(const std::string& what) {
  failure = what + name(*current);
  _longjmp(scheduler, 1);
}

inline uint32_t own_address(uint32_t offset) { return (current->block->rank << kRankBit) + kSharedBase + offset; }
inline Block& block_of(uint32_t address) {
  const uint32_t rank = address >> kRankBit;
  if (rank >= blocks.size()) fail("access to shared memory of block " + std::to_string(rank) + " of a cluster of " + std::to_string(blocks.size()));
  return blocks[rank];
}

// An access to that of any block of the cluster.
inline uint8_t* at_cluster(uint32_t address, uint32_t bytes, uint32_t alignment) {
  Block& block = block_of(address);
  const int64_t offset = int64_t{address % (1u << kRankBit)} - kSharedBase;
  if (address % alignment != 0) fail("misaligned access of " + std::to_string(bytes) + " bytes to shared memory");
  if (offset < 0 || offset + bytes > shared_bytes) {
    fail("access to byte " + std::to_string(offset) + " of " + std::to_string(shared_bytes) + " of shared memory");
  }
  if (block.living == 0) fail("access to shared memory of a block that has ended");
  return block.shared + offset;
}
// To this block's.
inline uint8_t* at(uint32_t address, uint32_t bytes) {
  if (&block_of(address) != current->block) fail("access to another block's shared memory");
  return at_cluster(address, bytes, bytes);
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

// Of all lanes' values the last one makes what each is given back: make(given, made). Each type of `make` is an instruction.
template <typename Made, typename Given, typename Make>
Made together(const Given& value, const Make& make) {
  static_assert(sizeof(Given) <= 64 && sizeof(Made) <= 64);
  static char instruction;
  Warp& warp = *current->warp;
  const int set = current->set, lane = current->index.x % kLanes, before = warp.generation;
  current->set ^= 1;
  if (warp.arrived[set] > 0 && warp.instruction[set] != &instruction) fail("another instruction than other lanes of the warp have reached");
  warp.instruction[set] = &instruction;
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

// Answers with what all lanes gave, in an instruction of this type.
template <typename Instruction, typename T>
Exchanged<T> exchange(const T& value) {
  const int set = current->set;
  together<char>(value, [](auto, auto) { static_cast<void>(sizeof(Instruction*)); });
  return {current->warp->given[set]};
}

inline void pass(Gate& gate, int threads, bool orders = true) {
  const int before = gate.generation;
  if (orders) races::come(gate.order);
  if (++gate.arrived == threads) {
    races::all_have_come(gate.order);
    gate.arrived = 0;
    ++gate.generation;
  } else {
    wait(gate.generation, before);
  }
  races::go_on(gate.order);
}

// The same, which tells whether something holds for any thread.
inline int pass_any(Gate& gate, int threads, bool x) {
  int& any = gate.any[gate.generation % 2];
  any |= x;
  // The answer before this one, which all have taken when all have come.
  if (gate.arrived + 1 == threads) gate.any[(gate.generation + 1) % 2] = 0;
  pass(gate, threads);
  return any;
}

inline int barrier(bool x) { return pass_any(current->block->gate, fibers.size() / blocks.size(), x); }

// Copies are made as late as they may be: when the thread waits for them. They may be made at once: so nobody else's access may be unordered with either.
inline void start_copy(uint32_t destination, const void* source, int bytes, int source_bytes) {
  if (reinterpret_cast<uintptr_t>(source) % bytes != 0) fail("misaligned copy");
  if (source_bytes < 0 || source_bytes > bytes) fail("copy of " + std::to_string(source_bytes) + " of " + std::to_string(bytes) + " bytes");
  races::note_by_thread(at(destination, bytes), bytes, true, races::here());
  current->copies.back().push_back({at(destination, bytes), source, bytes, source_bytes});
}
inline void commit_copies() { current->copies.emplace_back(); }
inline void wait_for_copies(size_t pending) {
  auto& groups = current->copies;
  while (groups.size() > pending + 1) {
    for (const Copy& copy : groups.front()) {
      races::note_by_thread(copy.destination, copy.bytes, true, races::here());
      std::memcpy(copy.destination, copy.source, copy.source_bytes);
      std::memset(copy.destination + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
    }
    groups.erase(groups.begin());
  }
}

// The same of a warp's lanes, in an instruction of this type.
template <typename Instruction>
void pass_warp() {
  races::Order& order = current->warp->order[current->set];
  races::come(order);
  together<char>(0, [&](auto, auto) {
    static_cast<void>(sizeof(Instruction*));
    races::all_have_come(order);
  });
  races::go_on(order);
}

inline void start() {
  kernel(params);
  if (current->copies.size() > 1 || !current->copies.back().empty()) fail("the end before copies have arrived");
  if (!current->accumulators.empty()) fail("the end before products have been waited for");
  if (must_wait == kBeforeEnd && !current->waited) fail("the end before the kernels before have been waited for");
  current->done = true;
  --current->block->living;
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

// Lets warps go on until they can go no further, or at random no longer, but for some of the slow threads. Whether anything has moved.
inline bool let_go_on(const std::vector<bool>& slow, unsigned slowness) {
  bool moved = false;
  for (const int warp : an_order(warps.size())) {
    const std::vector<int> lanes = an_order(kLanes);
    for (bool more = true; more;) {
      more = false;
      for (const int lane : lanes) {
        Fiber& fiber = fibers[warp * kLanes + lane];
        if (!fiber.can_go_on() || (slow[warp * kLanes + lane] && random_numbers() % slowness != 0)) continue;
        resume(fiber);
        if (!failure.empty()) return true;
        more = moved = true;
      }
      if (!in_order && random_numbers() % 8 == 0) break;
    }
  }
  return moved;
}

// One of the things that happen by themselves.
inline void let_happen() {
  const size_t which = in_order ? 0 : random_numbers() % under_way.size();
  const auto happens = std::move(under_way[which]);
  under_way.erase(under_way.begin() + which);
  races::ignored = true;
  if (_setjmp(scheduler) == 0) happens();
  races::ignored = false;
}

// The launch before this one.
inline void make_the_one_before() {
  const char* its_failure = std::exchange(before, nullptr)();
  if (its_failure != nullptr) failure = its_failure;
  ++ends_seen;
}

inline void run_cluster() {
  const unsigned slowness = 4u << random_numbers() % 16, rarity = 2u << random_numbers() % 5;
  const std::vector<bool> none(fibers.size());
  std::vector<bool> slow = none;
  for (size_t warp = 0; warp < warps.size() && !in_order; ++warp) {
    const unsigned kind = random_numbers() % rarity;  // 0: a slow warp, 1: one with slow lanes, mostly others than the first
    for (int lane = 0; lane < kLanes; ++lane) slow[warp * kLanes + lane] = kind == 0 || (kind == 1 && random_numbers() % (lane == 0 ? 8 : 2) == 0);
  }
  while (failure.empty()) {
    if (let_go_on(slow, slowness)) continue;
    if (!in_order && !under_way.empty() && random_numbers() % 8 != 0) {
      let_happen();
      continue;
    }
    if (let_go_on(slow, 2) || let_go_on(none, 1)) continue;
    const auto left = std::find_if(fibers.begin(), fibers.end(), [](const Fiber& fiber) { return !fiber.done; });
    const bool waits_for_launch = std::any_of(fibers.begin(), fibers.end(), [](const Fiber& fiber) { return !fiber.done && fiber.waits_for == &ends_seen; });
    if (!under_way.empty() && left != fibers.end()) let_happen();
    else if (waits_for_launch && before != nullptr) make_the_one_before();
    else if (!under_way.empty()) failure = "the end of a cluster before copies have arrived";
    else if (left != fibers.end()) failure = "waiting for ever" + name(*left);
    else return;
  }
}

// Null, or what went wrong. A grid of clusters of blocks of threads; a block has `bytes` of shared memory, which is NaN before, a cluster all of `memory`.
// In order clusters come from the last one on: what starts last on a GPU, and may get by without a wait there, here finds the kernel before not run.
inline const char* launch(void (*entry)(const void*), const void* argument, int grid, int cluster_size, int threads, uint8_t* memory,
                          uint32_t bytes, int seed, const char* (*made_before)(), MustWait before_what) {
  kernel = entry;
  grid_size.x = grid;
  params = argument;
  shared = memory;
  shared_bytes = bytes;
  in_order = seed == 0;
  random_numbers.seed(seed);
  before = made_before;
  must_wait = before_what;
  failure.clear();
  fibers.resize(threads * cluster_size);
  warps.resize(fibers.size() / kLanes);
  for (const int index : an_order(grid / cluster_size)) {
    cluster = in_order ? grid / cluster_size - 1 - index : index;
    under_way.clear();
    races::start(fibers.size(), cluster_size, memory, kMostShared, bytes < 32768 ? 1 : 4);
    cluster_gate = {};
    blocks.assign(cluster_size, Block{});
    for (int rank = 0; rank < cluster_size; ++rank) {
      Block& block = blocks[rank];
      block.index.x = cluster * cluster_size + rank;
      block.size.x = threads;
      block.rank = rank;
      block.shared = memory + rank * kMostShared;
      block.living = threads;
      std::memset(block.shared, 0xff, bytes);
    }
    for (Warp& warp : warps) {
      warp.arrived[0] = warp.arrived[1] = warp.generation = 0;
      warp.order[0] = warp.order[1] = races::order();
      warp.registers = 65536 / threads / 8 * 8;
    }
    for (size_t i = 0; i < fibers.size(); ++i) {
      Fiber& fiber = fibers[i];
      if (fiber.stack == nullptr) fiber.stack.reset(new char[kStackBytes]);
      fiber.index.x = i % threads;
      fiber.block = &blocks[i / threads];
      fiber.warp = &warps[i / kLanes];
      fiber.set = 0;
      fiber.started = fiber.done = fiber.waited = fiber.fenced = false;
      fiber.waits_for = nullptr;
      fiber.copies.assign(1, {});
      fiber.products.assign(1, {});
      fiber.accumulators.clear();
      fiber.in_step = 0;
      getcontext(&fiber.first);
      fiber.first.uc_stack.ss_sp = fiber.stack.get();
      fiber.first.uc_stack.ss_size = kStackBytes;
      makecontext(&fiber.first, start, 0);
    }
    run_cluster();
    for (size_t i = 0; i < fibers.size() && failure.empty(); i += kLanes) {
      const Fiber& lane = fibers[i];
      if (lane.in_step != lane.block->in_step[lane.index.x / kWarpgroup].size()) failure = "less than other warps of the warpgroup have executed";
    }
    if (!failure.empty()) return failure.c_str();
  }
  return nullptr;
}

}  // namespace gpu

#define threadIdx (gpu::current->index)
#define blockIdx (gpu::current->block->index)
#define gridDim (gpu::grid_size)
#define blockDim (gpu::current->block->size)

inline void __syncthreads() { gpu::barrier(false); }
inline int __syncthreads_or(int x) { return gpu::barrier(x != 0); }
inline void __syncwarp() { gpu::pass_warp<struct Barrier>(); }
template <typename T>
T __shfl_xor_sync(uint32_t, T x, int mask) { return gpu::exchange<struct Shuffle>(x)[(threadIdx.x % 32) ^ mask]; }
template <typename T>
T __shfl_sync(uint32_t, T x, int lane) { return gpu::exchange<struct Shuffle>(x)[lane]; }
inline uint32_t __ballot_sync(uint32_t, bool x) {
  return gpu::together<uint32_t>(x, [](auto given, auto made) {
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= static_cast<uint32_t>(given[lane]) << lane;
    for (int lane = 0; lane < 32; ++lane) made.put(lane, bits);
  });
}
inline uint32_t __reduce_add_sync(uint32_t, uint32_t x) {
  return gpu::together<uint32_t>(x, [](auto given, auto made) {
    uint32_t sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += given[lane];
    for (int lane = 0; lane < 32; ++lane) made.put(lane, sum);
  });
}
inline uint32_t __reduce_or_sync(uint32_t, uint32_t x) {
  return gpu::together<uint32_t>(x, [](auto given, auto made) {
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= given[lane];
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
inline int32_t __float_as_int(float x) { return same_bits<int32_t>(x); }
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
inline int __ffs(uint32_t x) { return __builtin_ffs(x); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __dp4a(int x, int y, int sum) {
  for (int i = 0; i < 32; i += 8) sum += static_cast<int8_t>(x >> i) * static_cast<int8_t>(y >> i);
  return sum;
}
// 0 for divisors beyond 2^126.
inline float __fdividef(float x, float y) { return std::fabs(y) > 0x1p126f && std::fabs(y) < INFINITY ? x * 0.0f : x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmul_rn(float x, float y) { return x * y; }
// NaN as GPUs make it, whose bits kernels may take for a number's.
inline float __fmaf_rn(float x, float y, float z) {
  const float sum = std::fma(x, y, z);
  return sum != sum ? same_bits<float>(0x7fffffff) : sum;
}
template <typename T>
T __ldcs(const T* pointer) { return *pointer; }
template <typename T>
T __ldg(const T* pointer) { return *pointer; }
template <typename T>
T __ldcg(const T* pointer) { return *pointer; }
template <typename T>
void __stcg(T* pointer, T value) { *pointer = value; }
template <typename T>
T atomicAdd(T* pointer, T x) { return std::exchange(*pointer, *pointer + x); }
inline void* __cvta_shared_to_generic(uint32_t address) { return gpu::at(address, 1); }

#ifdef SAGE_RACES
#include "races_found.h"
#endif
