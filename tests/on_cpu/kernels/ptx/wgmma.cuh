// Products of a warpgroup. All that one reads, registers and shared memory, it reads as late as it may: when its warp waits for it. Registers that it
// will write are no numbers until then. Sums are as those of mma_sync.cuh.
#pragma once

#include "kernels/ptx/mma_sync.cuh"
#include "kernels/ptx/wgmma_descriptor.cuh"

namespace gpu {

constexpr uint32_t kUndefined = 0x7fffffff;  // as a float no number

// An operand in shared memory.
struct Operand {
  uint32_t start, leading, stride;  // bytes
  uint32_t swizzled;                // bits of a 16-byte chunk's place in a row that are exchanged
  uint32_t row_bytes;
  const Product& product;
  uint32_t thread;  // that reads it

  Operand(uint64_t descriptor, const Product& its_product, uint32_t its_thread) : product(its_product), thread(its_thread) {
    const auto field = [&](int bit) { return static_cast<uint32_t>(descriptor >> bit & 0x3fff) * 16; };
    const int mode = descriptor >> 62;
    if (descriptor & 0x3fffc000c000c000 || mode == 0) fail("descriptor of an operand with bits that mean nothing here");
    start = field(0), leading = field(16), stride = field(32);
    swizzled = (1u << (4 - mode)) - 1;
    row_bytes = 16u << (4 - mode);
  }
  const uint8_t* at(uint32_t offset, uint32_t bytes) const {
    const uint32_t linear = start + offset;
    const uint8_t* place = gpu::at((current->block->rank << kRankBit) + (linear ^ (linear >> 7 & swizzled) << 4), bytes);
    races::note_operand(place, bytes, product.known, thread, product.where);
    return place;
  }
  // Rows that lie along K: eight, then the next eight.
  const uint8_t* along_k(int row, int byte, uint32_t bytes) const { return at(row / 8 * stride + row % 8 * row_bytes + byte, bytes); }
  // Rows of 16-bit elements that lie along N: of as many elements as a row has, eight k, then the next eight; then the next elements.
  const uint8_t* along_n(int k, int n) const {
    const int elements = row_bytes / 2;
    return at(n / elements * leading + k / 8 * stride + k % 8 * row_bytes + n % elements * 2, 2);
  }
};

inline Accumulator& accumulator_of(Fiber& fiber, const uint32_t* d) {
  return *std::find_if(fiber.accumulators.begin(), fiber.accumulators.end(), [&](const Accumulator& some) { return some.d == d; });
}

// All four warps of a warpgroup execute the same, though not at the same time.
inline void execute_in_step(const InStep& mine) {
  Fiber& fiber = *current;
  if (fiber.index.x % kLanes != 0) return;  // the first lane, for its warp
  auto& executed = fiber.block->in_step[fiber.index.x / kWarpgroup];
  const size_t index = fiber.in_step++;
  if (index == executed.size()) executed.push_back(mine);
  else if (!(executed[index] == mine)) fail("something else than other warps of the warpgroup have executed");
}
template <typename Instruction>
void execute_in_step() {
  static const char instruction = 0;
  execute_in_step({nullptr, {}, false, &instruction});
}

// Starts a product with D in `count` registers.
inline void start_product(const Product& product, size_t count) {
  Fiber& fiber = *current;
  if (!fiber.fenced) fail("product of registers without a fence since they may have been written");
  execute_in_step({product.multiply, {product.descriptors[0], product.descriptors[1]}, product.accumulate, nullptr});
  auto& all = fiber.accumulators;
  if (std::none_of(all.begin(), all.end(), [&](const Accumulator& some) { return some.d == product.d; })) {
    all.push_back({product.d, std::vector<uint32_t>(product.d, product.d + count), 0});
    std::fill_n(product.d, count, kUndefined);
  }
  ++accumulator_of(fiber, product.d).products;
  fiber.products.back().push_back(product);
  if (fiber.index.x % kLanes == 0) fiber.products.back().back().known = races::what_is_known();
}

// By a lane for its warp: a product of the oldest group.
// along_k: how the rows of B lie.
template <typename Element, typename Sum, int kColumns, bool along_k, typename Add>
void multiply_rows(int warp, size_t index, const Add& add) {
  using In = sage::ptx::Numbers<Element>;
  constexpr int kHalf = 4 * In::kCount, kInner = 2 * kHalf;
  Fiber* lanes = &fibers[warp * kLanes];
  const auto product = [&](int lane) -> const Product& { return lanes[lane].products.front()[index]; };
  const Product& mine = product(0);
  typename In::Type left[16][kInner], right[kColumns / 8][kInner][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    const Product& its = product(lane);
    if (its.descriptors[0] != mine.descriptors[0] || its.descriptors[1] != mine.descriptors[1] || its.accumulate != mine.accumulate ||
        its.multiply != mine.multiply) {
      fail("other operands than other lanes of the warp have");
    }
    for (int part = 0; part < 4 && its.a != nullptr; ++part) {
      for (int i = 0; i < In::kCount; ++i) left[lane / 4 + part % 2 * 8][lane % 4 * In::kCount + i + part / 2 * kHalf] = In::get(its.a[part], i);
    }
  }
  const auto word_of = [](const uint8_t* bytes, size_t count) {
    uint32_t word = 0;
    std::memcpy(&word, bytes, count);
    return word;
  };
  if (mine.a == nullptr) {
    const Operand a(mine.descriptors[0], mine, warp * kLanes);
    // Which warp of the four reads which rows is not said: they may be any.
    for (int row = 0; row < 64; ++row) {
      for (int k = 0; k < kInner; k += In::kCount) {
        const uint32_t word = word_of(a.along_k(row, k * 4 / In::kCount, 4), 4);
        for (int i = 0; i < In::kCount && row / 16 == warp % 4; ++i) left[row % 16][k + i] = In::get(word, i);
      }
    }
  }
  const Operand b(mine.descriptors[1], mine, warp * kLanes);
  for (int k = 0; k < kInner; ++k) {
    for (int n = 0; n < kColumns; ++n) {
      const uint8_t* element = along_k ? b.along_k(n, k * 4 / In::kCount, 4 / In::kCount) : b.along_n(k, n);
      right[n / 8][k][n % 8] = In::get(word_of(element, 4 / In::kCount), 0);
    }
  }
  std::vector<uint32_t>* values[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) values[lane] = &accumulator_of(lanes[lane], product(lane).d).values;
  for (int group = 0; group < kColumns / 8; ++group) {
    for (int row = 0; row < 16; ++row) {
      const auto place = [&](int column) -> uint32_t& { return (*values[row % 8 * 4 + column / 2])[group * 4 + row / 8 * 2 + column % 2]; };
      Sum sums[8];
      for (int column = 0; column < 8; ++column) sums[column] = mine.accumulate ? same_bits<Sum>(place(column)) : Sum{};
      add(sums, left[row], right[group]);
      for (int column = 0; column < 8; ++column) place(column) = same_bits<uint32_t>(sums[column]);
    }
  }
}

// Makes the oldest group of a warp's products.
inline void make_products(int warp) {
  Fiber* lanes = &fibers[warp * kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    if (lanes[lane].products.front().size() != lanes[0].products.front().size()) fail("another number of products than other lanes of the warp have");
  }
  for (size_t i = 0; i < lanes[0].products.front().size(); ++i) lanes[0].products.front()[i].multiply(warp, i);
  for (int lane = 0; lane < kLanes; ++lane) {
    Fiber& fiber = lanes[lane];
    for (const Product& product : fiber.products.front()) --accumulator_of(fiber, product.d).products;
    fiber.products.erase(fiber.products.begin());
    const auto left = std::remove_if(fiber.accumulators.begin(), fiber.accumulators.end(), [](const Accumulator& some) {
      if (some.products > 0) return false;
      if (std::any_of(some.d, some.d + some.values.size(), [](uint32_t x) { return x != kUndefined; })) fail("writing of registers that a product will write");
      std::copy(some.values.begin(), some.values.end(), some.d);
      return true;
    });
    fiber.accumulators.erase(left, fiber.accumulators.end());
  }
}

}  // namespace gpu

namespace sage::ptx {

inline void wgmma_fence() {
  gpu::exchange<struct WgmmaFence>(0);
  gpu::execute_in_step<struct WgmmaFence>();
  gpu::current->fenced = true;
}
inline void wgmma_commit() {
  gpu::execute_in_step<struct WgmmaCommit>();
  gpu::current->products.emplace_back();
}
template <int Pending>
void wgmma_wait() {
  gpu::execute_in_step<std::integral_constant<int, Pending>>();
  gpu::together<char>(0, [](auto, auto) {
    const int warp = gpu::current->warp - gpu::warps.data();
    gpu::races::ignored = true;
    while (gpu::current->products.size() > Pending + 1) gpu::make_products(warp);
    gpu::races::ignored = false;
  });
  gpu::current->fenced = false;  // what it had to wait for it will read or write
}
template <typename T>
void wgmma_hold(T&) {}

template <int N>
void multiply_integers(int warp, size_t index) {
  gpu::multiply_rows<int8_t, int32_t, 2 * N, true>(warp, index,
                                              [](int32_t(&sums)[8], const auto& left, const auto& right) { add_integers(sums, left, right); });
}
template <int N>
void wgmma_s8_s8(int32_t (&d)[N], const uint32_t (&a)[4], const Descriptor& b, bool accumulate) {
  gpu::start_product({multiply_integers<N>, reinterpret_cast<uint32_t*>(d), a, {0, b.bits()}, accumulate, gpu::races::here()}, N);
}
template <int N>
void wgmma_s8_s8(int32_t (&d)[N], const Descriptor& a, const Descriptor& b, bool accumulate) {
  gpu::start_product({multiply_integers<N>, reinterpret_cast<uint32_t*>(d), nullptr, {a.bits(), b.bits()}, accumulate, gpu::races::here()}, N);
}

template <typename Element, int N, bool along_k>
void multiply_floats(int warp, size_t index) {
  gpu::multiply_rows<Element, float, 2 * N, along_k>(warp, index, [](float(&sums)[8], const auto& left, const auto& right) {
    double exact[8];
    std::copy(sums, sums + 8, exact);
    add_exactly(exact, left, right);
    std::copy(exact, exact + 8, sums);
  });
}
template <typename Element, int N>
void wgmma_f32_along_k(float (&d)[N], const Descriptor& a, const Descriptor& b, bool accumulate) {
  gpu::start_product({multiply_floats<Element, N, true>, reinterpret_cast<uint32_t*>(d), nullptr, {a.bits(), b.bits()}, accumulate, gpu::races::here()}, N);
}
template <typename Element, int N>
void wgmma_f32(float (&d)[N], const uint32_t (&a)[4], const Descriptor& b) {
  gpu::start_product({multiply_floats<Element, N, false>, reinterpret_cast<uint32_t*>(d), a, {0, b.bits()}, true, gpu::races::here()}, N);
}

}  // namespace sage::ptx
