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
  // Of a part, each four numbers of all lanes beside one another, then three times two.
  const int64_t part_floats = warps * Config::kPartialFloats * 32;
  float* first = p.partials + (work.left * work.parts * warps + place) * (Config::kPartialFloats * 32);
  float* mine = first + work.part * part_floats;
#pragma unroll
  for (int i = 0; i < kOut; i += 4) {
    __stcg(reinterpret_cast<float4*>(mine + i * 32) + lane, make_float4(out[i], out[i + 1], out[i + 2], out[i + 3]));
  }
  auto* pairs = reinterpret_cast<float2*>(mine + kOut * 32) + lane;
  __stcg(pairs, make_float2(rows.sum[0], rows.sum[1]));
  __stcg(pairs + 32, make_float2(rows.base[0], rows.base[1]));
  __stcg(pairs + 64, make_float2(rows.q_scale[0], rows.q_scale[1]));
  __syncwarp();
  int before = 0;
  if (lane == 0) {
    ptx::grid_dependency_wait();  // for the zeros
    before = ptx::atomic_add_acq_rel(p.arrived + work.left * warps + place, 1);
  }
  if (__shfl_sync(0xffffffffu, before, 0) != work.parts - 1) return false;
  __syncwarp();  // what lane 0 has seen arrive is there for the others too

  // All at once: each load takes as long as a dozen.
  float sum[kParts][2], factor[kParts][2], q_scale[kParts][2];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const auto* theirs = reinterpret_cast<const float2*>(first + part * part_floats + kOut * 32) + lane;
    const bool there = part < work.parts;
    const float2 sums = there ? __ldcg(theirs) : make_float2(0.0f, 0.0f);
    const float2 bases = there ? __ldcg(theirs + 32) : make_float2(-INFINITY, -INFINITY);
    const float2 scales = there ? __ldcg(theirs + 64) : make_float2(INFINITY, INFINITY);
    sum[part][0] = sums.x, sum[part][1] = sums.y;
    factor[part][0] = bases.x, factor[part][1] = bases.y;  // as yet
    q_scale[part][0] = scales.x, q_scale[part][1] = scales.y;
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    // A row whose scores were beyond measure in some part has a smaller scale there, which is then all parts'.
#pragma unroll
    for (int part = 0; part < kParts; ++part) rows.q_scale[row] = fminf(rows.q_scale[row], q_scale[part][row]);
    rows.base[row] = -INFINITY;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float& base = factor[part][row];
      if (part < work.parts && q_scale[part][row] != rows.q_scale[row]) {
        base = (base + Config::kLevel) * ptx::divide(rows.q_scale[row], q_scale[part][row]) - Config::kLevel;
      }
      rows.base[row] = fmaxf(rows.base[row], base);
    }
    rows.sum[row] = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      factor[part][row] = ptx::ex2(factor[part][row] - rows.base[row]);
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
    for (int i = 0; i < kOut; i += 4) {
      const float4 four = __ldcg(reinterpret_cast<const float4*>(theirs + i * 32) + lane);
      out[i] = __fmaf_rn(four.x, factor[part][0], out[i]);
      out[i + 1] = __fmaf_rn(four.y, factor[part][0], out[i + 1]);
      out[i + 2] = __fmaf_rn(four.z, factor[part][1], out[i + 2]);
      out[i + 3] = __fmaf_rn(four.w, factor[part][1], out[i + 3]);
    }
  }
  return true;
}

}  // namespace sage
