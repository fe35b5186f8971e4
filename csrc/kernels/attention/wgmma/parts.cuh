// Hopper's attention kernel: tiles of the output that several clusters compute, from a part of the keys each.
#pragma once

#include "kernels/attention/wgmma/softmax.cuh"
#include "kernels/ptx/cluster.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"

namespace sage {

// Leaves what a warp has made of its part for the warp that comes last to these rows. That one gets all parts, added up in their order
// whichever came last, so that the bits are always the same; for the others there is nothing more to do: false.
__device__ __forceinline__ bool add_parts(const Config::Params& p, const Work& work, int warp, Rows& rows, Output& out) {
  constexpr int kOut = Config::kHeadDim / 2;
  constexpr int kParts = Config::kMostParts;
  const int lane = threadIdx.x % 32;
  const int64_t warps = ptx::cluster_size() * Config::kConsumerWarps;
  const int64_t place = ptx::cluster_rank() * Config::kConsumerWarps + warp;  // in the tile
  // Of a part, each number of all lanes beside one another.
  const int64_t part_floats = warps * Config::kLeftFloats * 32;
  float* first = p.left + (work.left * work.parts * warps + place) * (Config::kLeftFloats * 32) + lane;
  float* mine = first + work.part * part_floats;
#pragma unroll
  for (int i = 0; i < kOut; ++i) __stcg(mine + i * 32, out[i]);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    __stcg(mine + (kOut + row) * 32, rows.sum[row]);
    __stcg(mine + (kOut + 2 + row) * 32, rows.reference[row]);
    __stcg(mine + (kOut + 4 + row) * 32, rows.q_scale[row]);
  }
  __threadfence();
  __syncwarp();
  int before = 0;
  if (lane == 0) {
    ptx::grid_dependency_wait();  // for the zeros
    before = atomicAdd(p.arrived + work.left * warps + place, 1);
  }
  if (__shfl_sync(0xffffffffu, before, 0) != work.parts - 1) return false;
  __threadfence();

  // All at once: each load takes as long as a dozen.
  float sum[kParts][2], factor[kParts][2], q_scale[kParts][2];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const float* theirs = first + part * part_floats + kOut * 32;
    const bool there = part < work.parts;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      sum[part][row] = there ? __ldcg(theirs + row * 32) : 0.0f;
      factor[part][row] = there ? __ldcg(theirs + (2 + row) * 32) : -INFINITY;  // the reference as yet
      q_scale[part][row] = there ? __ldcg(theirs + (4 + row) * 32) : INFINITY;
    }
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    // A row whose scores were beyond measure in some part has a smaller scale there, which is then all parts'.
#pragma unroll
    for (int part = 0; part < kParts; ++part) rows.q_scale[row] = fminf(rows.q_scale[row], q_scale[part][row]);
    rows.reference[row] = -INFINITY;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float& reference = factor[part][row];
      if (part < work.parts && q_scale[part][row] != rows.q_scale[row]) {
        reference = (reference + Config::kLevel) * ptx::divide(rows.q_scale[row], q_scale[part][row]) - Config::kLevel;
      }
      rows.reference[row] = fmaxf(rows.reference[row], reference);
    }
    rows.sum[row] = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      factor[part][row] = ptx::ex2(factor[part][row] - rows.reference[row]);
      if (part < work.parts) rows.sum[row] = __fmaf_rn(sum[part][row], factor[part][row], rows.sum[row]);
    }
  }
#pragma unroll
  for (int i = 0; i < kOut; ++i) out[i] = 0.0f;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if (part >= work.parts) break;
    const float* theirs = first + part * part_floats;
#pragma unroll
    for (int i = 0; i < kOut; ++i) out[i] = __fmaf_rn(__ldcg(theirs + i * 32), factor[part][i / 2 % 2], out[i]);
  }
  return true;
}

}  // namespace sage
