// mbarrier (sm_90): barriers in shared memory that count arrivals and bytes, and the bulk copies that complete on them.
#pragma once

#include "kernels/tensor_view.h"

namespace sage::ptx {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// Arrives and expects `bytes` more from bulk copies before the phase completes.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}

// Expects `bytes` more from bulk copies before the phase completes.
__device__ __forceinline__ void mbarrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the phase of this parity has completed: to ask early, and to wait only if it had not.
__device__ __forceinline__ uint32_t mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;\n}\n" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}
__device__ __forceinline__ void mbarrier_wait_unless(uint32_t done, uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nsetp.ne.b32 done, %2, 0;\n"
      "@done bra DONE;\n"
      "WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\nbra WAIT;\nDONE:\n}\n" ::"r"(barrier),
      "r"(parity), "r"(done)
      : "memory");
}

// Waits until the phase of this parity has completed.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) { mbarrier_wait_unless(0, barrier, parity); }

// Copies the box of a mapped [batch, head, token, channel] tensor that starts at these coordinates, zeros outside.
__device__ __forceinline__ void tensor_copy(uint32_t shared_destination, const TensorMap& map, int channel, int token,
                                            int head, int batch, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];\n" ::"r"(shared_destination),
      "l"(&map), "r"(channel), "r"(token), "r"(head), "r"(batch), "r"(barrier)
      : "memory");
}

// Makes this thread's writes to shared memory visible to wgmma and the copy engine.
__device__ __forceinline__ void proxy_async_fence() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

}  // namespace sage::ptx
