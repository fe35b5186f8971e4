// Barriers in shared memory, and the copies that complete on them. These arrive as late as they may: when no thread can go on without. Where they
// will is NaN from their start on, as if it had been overwritten at once.
#pragma once

#include "gpu.h"
#include "kernels/tensor_view.h"
#include "tensor_map.h"

namespace gpu {

// One in any block of the cluster.
inline Mbarrier& mbarrier(uint32_t address) {
  at_cluster(address, 8, 8);
  auto& mbarriers = block_of(address).mbarriers;
  const auto found = mbarriers.find(address);
  if (found == mbarriers.end()) fail("use of a barrier that has not been initialised");
  if (found->second.hidden_from_all_but != nullptr && found->second.hidden_from_all_but != current) fail("use of a barrier whose initialisation need not be seen");
  return found->second;
}
inline Mbarrier& own_mbarrier(uint32_t address) {
  at(address, 8);
  return mbarrier(address);
}

inline void complete_if_all_is_there(Mbarrier& barrier) {
  if (barrier.missing > 0 || barrier.bytes != 0) return;
  races::all_have_come(barrier.order);
  barrier.missing = barrier.arrivals;
  barrier.waited_for = false;
  ++barrier.phase;
}

inline void expect(Mbarrier& barrier, int64_t bytes) {
  barrier.bytes += bytes;
  if (std::abs(barrier.bytes) >= 1 << 20) fail("more bytes than a barrier can count");
}

inline void arrive(Mbarrier& barrier) {
  // The PTX ISA asks for it.
  if (barrier.phase > 0 && !barrier.waited_for) fail("arrival at a barrier before anyone has waited for its last phase");
  if (barrier.missing == 0) fail("more arrivals at a barrier than it expects");
  races::come(barrier.order);
  --barrier.missing;
  complete_if_all_is_there(barrier);
}

inline bool try_wait(Mbarrier& barrier, uint32_t parity) {
  if (parity > 1) fail("parity " + std::to_string(parity) + " of a barrier");
  if (barrier.phase % 2 == static_cast<int>(parity)) return false;
  barrier.waited_for = true;
  races::go_on(barrier.order);
  races::has_completed(barrier.number, barrier.phase);
  return true;
}

// Starts a copy of bytes to shared memory of a block of the cluster, that count on a barrier there. write(destination) is called when it arrives.
template <typename Write>
void start_bulk_copy(uint32_t destination, uint32_t bytes, uint32_t alignment, uint32_t barrier, const Write& write) {
  if (&block_of(destination) != &block_of(barrier)) fail("copy to another block than its barrier is in");
  races::note_copy(at_cluster(destination, bytes, alignment), bytes, mbarrier(barrier).number, mbarrier(barrier).phase + 1, races::here());
  std::memset(at_cluster(destination, bytes, alignment), 0xff, bytes);
  Fiber* starts = current;
  under_way.push_back([=] {
    current = starts;
    write(at_cluster(destination, bytes, alignment));
    Mbarrier& there = mbarrier(barrier);
    expect(there, -static_cast<int64_t>(bytes));
    complete_if_all_is_there(there);
  });
}

// A box of a tensor. 16-byte chunks of a row of it are exchanged by bits of their address.
inline void start_tensor_copy(uint32_t destination, const sage::TensorMap& opaque, const int (&first)[kDimensions], uint32_t barrier) {
  TensorMap map;
  std::memcpy(&map, &opaque, sizeof map);
  if (map.data == nullptr) fail("copy by a tensor map that has not been encoded");
  const std::vector<int64_t> from(first, first + kDimensions);
  start_bulk_copy(destination, map.box[0] * map.box[1] * map.box[2] * map.box[3] * 2, 128, barrier, [=](uint8_t* shared) {
    const auto inside = [&](int dimension, int64_t at) { return at >= 0 && at < static_cast<int64_t>(map.sizes[dimension]); };
    uint32_t linear = destination;
    for (int64_t i3 = from[3]; i3 < from[3] + map.box[3]; ++i3) {
      for (int64_t i2 = from[2]; i2 < from[2] + map.box[2]; ++i2) {
        for (int64_t i1 = from[1]; i1 < from[1] + map.box[1]; ++i1) {
          const bool row_inside = inside(1, i1) && inside(2, i2) && inside(3, i3);
          const uint8_t* row = map.data + i1 * map.strides[0] + i2 * map.strides[1] + i3 * map.strides[2];
          for (int64_t i0 = from[0]; i0 < from[0] + map.box[0]; ++i0, linear += 2) {
            uint8_t* element = shared + ((linear ^ (linear >> 7 & 7) << 4) - destination);
            if (row_inside && inside(0, i0)) std::memcpy(element, row + i0 * 2, 2);
            else std::memset(element, 0, 2);
          }
        }
      }
    }
  });
}

}  // namespace gpu

namespace sage::ptx {

inline void mbarrier_init(uint32_t barrier, int arrivals) {
  gpu::at(barrier, 8);
  auto& mbarriers = gpu::current->block->mbarriers;
  const uint32_t number = gpu::current->block->rank * 64 + mbarriers.size();
  mbarriers[barrier] = {arrivals, arrivals, 0, 0, false, gpu::current, number};
}
inline void mbarrier_init_fence() {
  for (auto& [address, barrier] : gpu::current->block->mbarriers) {
    if (barrier.hidden_from_all_but == gpu::current) barrier.hidden_from_all_but = nullptr;
  }
}
inline void mbarrier_arrive(uint32_t barrier) { gpu::arrive(gpu::own_mbarrier(barrier)); }
inline void mbarrier_expect(uint32_t barrier, int bytes) { gpu::expect(gpu::own_mbarrier(barrier), bytes); }
inline void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  mbarrier_expect(barrier, bytes);
  mbarrier_arrive(barrier);
}
inline uint32_t mbarrier_test(uint32_t barrier, uint32_t parity) { return gpu::try_wait(gpu::own_mbarrier(barrier), parity); }
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  gpu::Mbarrier& waited_for = gpu::own_mbarrier(barrier);
  while (!gpu::try_wait(waited_for, parity)) gpu::wait(waited_for.phase, waited_for.phase);
}
inline void mbarrier_wait_unless(uint32_t done, uint32_t barrier, uint32_t parity) {
  if (!done) mbarrier_wait(barrier, parity);
}
inline void tensor_copy(uint32_t destination, const TensorMap& map, int channel, int token, int head, int batch, uint32_t barrier) {
  gpu::start_tensor_copy(destination, map, {channel, token, head, batch}, barrier);
}
inline void proxy_async_fence() { gpu::races::proxy_fence(); }

}  // namespace sage::ptx
