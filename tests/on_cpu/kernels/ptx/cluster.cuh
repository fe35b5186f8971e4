// Clusters: blocks that run together. An address says of which one it is, gpu.h how.
#pragma once

#include "gpu.h"
#include "kernels/ptx/mbarrier.cuh"

namespace sage::ptx {

inline uint32_t cluster_index() { return gpu::cluster; }
inline uint32_t cluster_rank() { return gpu::current->block->rank; }
inline uint32_t cluster_size() { return gpu::blocks.size(); }
inline void cluster_sync() { gpu::pass(gpu::cluster_gate, gpu::fibers.size()); }
inline void cluster_sync_relaxed() { gpu::pass(gpu::cluster_gate, gpu::fibers.size(), /*orders=*/false); }

// The same place in a block's memory.
inline uint32_t cluster_address(uint32_t address, uint32_t rank) { return address % (1u << gpu::kRankBit) | rank << gpu::kRankBit; }

inline float4 load_at(uint32_t address) { return *reinterpret_cast<const float4*>(gpu::at_cluster(address, 16, 16)); }

inline void mbarrier_arrive_at(uint32_t barrier) { gpu::arrive(gpu::mbarrier(barrier)); }
inline void store_at(uint32_t destination, int32_t value, uint32_t barrier, uint32_t rank) {
  gpu::start_bulk_copy(cluster_address(destination, rank), sizeof value, sizeof value, cluster_address(barrier, rank),
                       [value](uint8_t* there) { std::memcpy(there, &value, sizeof value); });
}

// Calls start(destination, barrier) for each block whose bit is set.
template <typename Start>
void to_each(uint16_t blocks, uint32_t destination, uint32_t barrier, const Start& start) {
  for (uint32_t rank = 0; rank < 16; ++rank) {
    if (blocks >> rank & 1) start(cluster_address(destination, rank), cluster_address(barrier, rank));
  }
}
inline void bulk_copy_to(uint16_t blocks, uint32_t destination, const void* source, int bytes, uint32_t barrier) {
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(source) % 16 != 0) gpu::fail("misaligned copy");
  to_each(blocks, destination, barrier, [&](uint32_t there, uint32_t counts) {
    gpu::start_bulk_copy(there, bytes, 16, counts, [=](uint8_t* shared) { std::memcpy(shared, source, bytes); });
  });
}
inline void tensor_copy_to(uint16_t blocks, uint32_t destination, const TensorMap& map, int channel, int token, int head, int batch, uint32_t barrier) {
  to_each(blocks, destination, barrier, [&](uint32_t there, uint32_t counts) { tensor_copy(there, map, channel, token, head, batch, counts); });
}

}  // namespace sage::ptx
