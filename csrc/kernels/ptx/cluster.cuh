// Clusters (sm_90): blocks of threads, one a multiprocessor, that reach each other's shared memory. A block launched without one is
// a cluster of its own.
#pragma once

#include "kernels/tensor_view.h"

namespace sage::ptx {

__device__ __forceinline__ uint32_t cluster_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%clusterid.x;\n" : "=r"(index));
  return index;
}

// This block's place in its cluster, and how many there are.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;\n" : "=r"(size));
  return size;
}

// A barrier for all threads of the cluster. Orders nothing but barriers' initialisation, after its fence.
__device__ __forceinline__ void cluster_sync_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;\n" ::: "memory");
}

// The same after all that a thread did before, in the memory of other blocks too.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\n" ::: "memory");
}

// An address of this block's shared memory in that of the block `rank`.
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared, uint32_t rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(remote) : "r"(shared), "r"(rank));
  return remote;
}

// Four numbers in the shared memory of any block, given by cluster_address.
__device__ __forceinline__ float4 load_at(uint32_t address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];\n" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address) : "memory");
  return x;
}

// Arrives at a barrier of any block, given by cluster_address. What this thread did in memory before is not published to that block:
// with the scope of a cluster it would be, at the price of a fence for the whole GPU.
__device__ __forceinline__ void mbarrier_arrive_at(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// Stores a number in the shared memory of the block `rank`; its four bytes count on the barrier there.
__device__ __forceinline__ void store_at(uint32_t shared_destination, int32_t value, uint32_t barrier, uint32_t rank) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];\n" ::"r"(
                   cluster_address(shared_destination, rank)),
               "r"(value), "r"(cluster_address(barrier, rank))
               : "memory");
}

// Copies contiguous bytes (a multiple of 16, from and to multiples of 16) to the same place of each block whose bit is set, where they
// count on its own barrier.
__device__ __forceinline__ void bulk_copy_to(uint16_t blocks, uint32_t shared_destination, const void* source, int bytes,
                                             uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;\n" ::"r"(
          shared_destination),
      "l"(source), "r"(bytes), "r"(barrier), "h"(blocks)
      : "memory");
}
// tensor_copy (mbarrier.cuh) to each such block.
__device__ __forceinline__ void tensor_copy_to(uint16_t blocks, uint32_t shared_destination, const TensorMap& map, int channel,
                                               int token, int head, int batch, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;\n" ::"r"(shared_destination),
      "l"(&map), "r"(channel), "r"(token), "r"(head), "r"(batch), "r"(barrier), "h"(blocks)
      : "memory");
}

}  // namespace sage::ptx
