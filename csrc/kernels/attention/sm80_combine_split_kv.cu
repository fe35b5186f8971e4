// Adds up parts of rows' keys, each relative to its own largest score.
#include "kernels/attention/sm80_combine_split_kv.h"

#include "kernels/attention/mma_sync_in_16_bits/row_out.cuh"
#include "kernels/ptx/grid.cuh"

namespace sage {

extern "C" __global__ void __launch_bounds__(Sm80CombineSplitKv::kThreads)
    sm80_combine_split_kv(const __grid_constant__ Sm80CombineSplitKv::Params p) {
  using Kernel = Sm80CombineSplitKv;
  ptx::grid_dependency_wait();
  constexpr int kLanes = 32 / Kernel::kSharers;  // that have other channels
  const int lane = threadIdx.x % 32;
  const int warps = (p.v_head_dim + Kernel::kChannelsOfWarp - 1) / Kernel::kChannelsOfWarp;
  const int64_t warp = int64_t{blockIdx.x} * (Kernel::kThreads / 32) + threadIdx.x / 32;
  const int64_t row = warp / warps;
  const int channel = static_cast<int>(warp % warps) * Kernel::kChannelsOfWarp + lane % kLanes * Kernel::kChannels;
  const int token = static_cast<int>(row % p.qo_len);
  const int64_t batch_head = row / p.qo_len;
  const int batch = static_cast<int>(batch_head / p.q_heads), head = static_cast<int>(batch_head % p.q_heads);
  if (batch >= p.batch) return;

  const bool there = channel < p.v_head_dim;
  Parts parts;
#pragma unroll 4
  for (int part = lane / kLanes; part < p.parts; part += Kernel::kSharers) {
    const int64_t from = row * p.parts + part;
    const float2 sums = *reinterpret_cast<const float2*>(p.part_sums + from * 2);
    const float4 out = there ? *reinterpret_cast<const float4*>(p.part_out + from * p.v_head_dim + channel) : float4{};
    parts.add(out, sums.x, sums.y);
  }
  add_of_lanes(parts, kLanes, 32);
  if (lane >= kLanes || !there) return;
  if (p.bfloat16 != 0) {
    store_channels(row_pointer<__nv_bfloat16>(p.out, batch, head, token) + channel, parts.out, parts.total);
  } else {
    store_channels(row_pointer<__half>(p.out, batch, head, token) + channel, parts.out, parts.total);
  }
  if (p.lse != nullptr && channel == 0) p.lse[row] = log_sum_exp(parts.largest, parts.total, p.level);
}

}  // namespace sage
