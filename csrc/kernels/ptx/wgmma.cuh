// wgmma (sm_90a): a warpgroup of four warps multiplies a 64-row A with B from shared memory, asynchronously. Warp w of the
// group holds rows 16w..16w+15; in them lane l holds rows l/4 and l/4+8 and of every 8 columns 2*(l%4) and 2*(l%4)+1:
// d[4*(column/8) + 2*(row/8) + column%2].
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cuda/std/type_traits>

#include "kernels/ptx/wgmma_descriptor.cuh"

namespace sage::ptx {

// Orders this warpgroup's earlier writes of registers before the wgmma that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }

// Waits until at most `Pending` of the newest committed groups are unfinished.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(Pending) : "memory");
}

// Keeps the compiler from moving accesses of accumulators across this point: it does not know that wgmma writes later.
template <int N>
__device__ __forceinline__ void wgmma_hold(int32_t (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}
template <int N>
__device__ __forceinline__ void wgmma_hold(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Operands of asm statements, which C++ has no lists for: places in the text, and the registers of an array.
#define SAGE_PLACES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SAGE_PLACES_64 \
  SAGE_PLACES_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SAGE_PLACES_96 \
  SAGE_PLACES_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SAGE_PLACES_128 \
  SAGE_PLACES_96 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SAGE_REGISTERS_8(c, d, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define SAGE_REGISTERS_32(c, d, i) \
  SAGE_REGISTERS_8(c, d, i), SAGE_REGISTERS_8(c, d, i + 8), SAGE_REGISTERS_8(c, d, i + 16), SAGE_REGISTERS_8(c, d, i + 24)
#define SAGE_REGISTERS_64(c, d, i) SAGE_REGISTERS_32(c, d, i), SAGE_REGISTERS_32(c, d, i + 32)
#define SAGE_REGISTERS_96(c, d, i) SAGE_REGISTERS_64(c, d, i), SAGE_REGISTERS_32(c, d, i + 64)
#define SAGE_REGISTERS_128(c, d, i) SAGE_REGISTERS_64(c, d, i), SAGE_REGISTERS_64(c, d, i + 64)

// D (64 x 64, s32) = A (64 x 32, s8, registers) * B (32 x 64, s8, shared) + D, or without D where accumulate is false.
__device__ __forceinline__ void wgmma_s8_s8(int32_t (&d)[32], const uint32_t (&a)[4], const Descriptor& b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {" SAGE_PLACES_32 "}, {%32, %33, %34, %35}, %36, p;\n}\n"
      : SAGE_REGISTERS_32("+r", d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "r"(static_cast<int32_t>(accumulate)));
}

// The same with A in shared memory.
__device__ __forceinline__ void wgmma_s8_s8(int32_t (&d)[32], const Descriptor& a, const Descriptor& b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {" SAGE_PLACES_32 "}, %32, %33, p;\n}\n"
      : SAGE_REGISTERS_32("+r", d, 0)
      : "l"(a.bits()), "l"(b.bits()), "r"(static_cast<int32_t>(accumulate)));
}

// D (64 x 64, f32) = A (64 x 16, fp16 or bf16) * B (16 x 64) + D, or without D where accumulate is false: both in shared memory, rows along K.
template <typename Element>
__device__ __forceinline__ void wgmma_f32_along_k(float (&d)[32], const Descriptor& a, const Descriptor& b, bool accumulate) {
  if constexpr (cuda::std::is_same_v<Element, __half>) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" SAGE_PLACES_32 "}, %32, %33, p, 1, 1, 0, 0;\n}\n"
        : SAGE_REGISTERS_32("+f", d, 0)
        : "l"(a.bits()), "l"(b.bits()), "r"(static_cast<int32_t>(accumulate)));
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" SAGE_PLACES_32 "}, %32, %33, p, 1, 1, 0, 0;\n}\n"
        : SAGE_REGISTERS_32("+f", d, 0)
        : "l"(a.bits()), "l"(b.bits()), "r"(static_cast<int32_t>(accumulate)));
  }
}

// D (64 x 2N, f32) += A (64 x 16, fp16 or bf16, registers) * B (16 x 2N, shared, rows along N).
template <typename Element, int N>
__device__ __forceinline__ void wgmma_f32(float (&d)[N], const uint32_t (&a)[4], const Descriptor& b) {
  constexpr bool kHalf = cuda::std::is_same_v<Element, __half>;
  static_assert(kHalf || cuda::std::is_same_v<Element, __nv_bfloat16>);
  if constexpr (N == 32 && kHalf) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" SAGE_PLACES_32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
        : SAGE_REGISTERS_32("+f", d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()));
  } else if constexpr (N == 32) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" SAGE_PLACES_32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
        : SAGE_REGISTERS_32("+f", d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()));
  } else if constexpr (N == 64 && kHalf) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" SAGE_PLACES_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
        : SAGE_REGISTERS_64("+f", d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()));
  } else if constexpr (N == 64) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SAGE_PLACES_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
        : SAGE_REGISTERS_64("+f", d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()));
  } else if constexpr (N == 96 && kHalf) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {" SAGE_PLACES_96 "}, {%96, %97, %98, %99}, %100, 1, 1, 1, 1;\n"
        : SAGE_REGISTERS_96("+f", d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()));
  } else if constexpr (N == 96) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" SAGE_PLACES_96 "}, {%96, %97, %98, %99}, %100, 1, 1, 1, 1;\n"
        : SAGE_REGISTERS_96("+f", d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()));
  } else if constexpr (N == 128 && kHalf) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" SAGE_PLACES_128 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;\n"
        : SAGE_REGISTERS_128("+f", d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()));
  } else if constexpr (N == 128) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" SAGE_PLACES_128 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;\n"
        : SAGE_REGISTERS_128("+f", d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()));
  } else {
    static_assert(N == 32 || N == 64 || N == 96 || N == 128);
  }
}

#undef SAGE_PLACES_32
#undef SAGE_PLACES_64
#undef SAGE_PLACES_96
#undef SAGE_PLACES_128
#undef SAGE_REGISTERS_8
#undef SAGE_REGISTERS_32
#undef SAGE_REGISTERS_64
#undef SAGE_REGISTERS_96
#undef SAGE_REGISTERS_128

}  // namespace sage::ptx
