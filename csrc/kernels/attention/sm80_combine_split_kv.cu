// Adds up parts of rows' keys, each relative to its own largest score.
#include "kernels/attention/sm80_combine_split_kv.h"

#include "kernels/attention/in_16_bits/row_out.cuh"
#include "kernels/ptx/grid.cuh"

namespace sage {

extern "C" __global__ void __launch_bounds__(Sm80CombineSplitKv::kThreads)
    sm80_combine_split_kv(const __grid_constant__ Sm80CombineSplitKv::Params p) {
  ptx::grid_dependency_wait();
  const int pieces = p.v_head_dim / Sm80CombineSplitKv::kChannels;
  const int64_t index = int64_t{blockIdx.x} * Sm80CombineSplitKv::kThreads + threadIdx.x;
  const int64_t row = index / pieces;
  const int channel = static_cast<int>(index % pieces) * Sm80CombineSplitKv::kChannels;
  const int token = static_cast<int>(row % p.qo_len);
  const int64_t batch_head = row / p.qo_len;
  const int batch = static_cast<int>(batch_head / p.q_heads), head = static_cast<int>(batch_head % p.q_heads);
  if (batch >= p.batch) return;

  float4 out = {};
  float largest = -INFINITY, total = 0.0f;
#pragma unroll 4
  for (int part = 0; part < p.parts; ++part) {
    const int64_t from = row * p.parts + part;
    const float2 sums = *reinterpret_cast<const float2*>(p.part_sums + from * 2);
    const float4 x = *reinterpret_cast<const float4*>(p.part_out + from * p.v_head_dim + channel);
    const float before = largest;
    largest = fmaxf(before, sums.x);
    const float rescale = weight_of(before, largest), weight = weight_of(sums.x, largest);
    total = total * rescale + sums.y * weight;
    out = make_float4(out.x * rescale + x.x * weight, out.y * rescale + x.y * weight, out.z * rescale + x.z * weight, out.w * rescale + x.w * weight);
  }
  if (p.bfloat16 != 0) {
    store_channels(const_cast<__nv_bfloat16*>(row_pointer<__nv_bfloat16>(p.out, batch, head, token)) + channel, out, total);
  } else {
    store_channels(const_cast<__half*>(row_pointer<__half>(p.out, batch, head, token)) + channel, out, total);
  }
  if (p.lse != nullptr && channel == 0) p.lse[row] = log_sum_exp(largest, total, p.level);
}

}  // namespace sage
