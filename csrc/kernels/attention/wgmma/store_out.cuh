// Hopper's attention kernel: the output to global memory.
#pragma once

#include "kernels/attention/wgmma/softmax.cuh"
#include "kernels/attention/wgmma/store_rows.cuh"
#include "kernels/element.cuh"

namespace sage {

// Four lanes hold four channels pairs each of four groups of 8 channels: hands each lane the 8 channels of one group.
__device__ __forceinline__ void transpose_quad(uint32_t (&pairs)[4]) {
  const int lane = threadIdx.x % 4;
  const bool odd = lane % 2, high = lane / 2;
  const uint32_t first = __shfl_xor_sync(0xffffffffu, odd ? pairs[0] : pairs[1], 1);
  const uint32_t second = __shfl_xor_sync(0xffffffffu, odd ? pairs[2] : pairs[3], 1);
  const uint32_t low_group[2] = {odd ? first : pairs[0], odd ? pairs[1] : first};
  const uint32_t high_group[2] = {odd ? second : pairs[2], odd ? pairs[3] : second};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, high ? low_group[i] : high_group[i], 2);
    pairs[i] = high ? other : low_group[i];
    pairs[i + 2] = high ? high_group[i] : other;
  }
}

// Writes this warp's 16 rows, the first of which is `first_row`. Staged: by way of shared memory, which takes fewer instructions than handing channels
// from lane to lane; under a mask there is no room for it at head_dim 128.
template <bool Staged>
__device__ __forceinline__ void store_out(const Config::Params& p, const Work& work, int first_row, int warp_row, const Rows& rows,
                                          const Output& out, const Memory& shared) {
  const int lane = threadIdx.x % 32;
  float inverse[2];
  const auto row_pointer = [&](int token) {
    return static_cast<uint16_t*>(p.out.data) + work.batch * p.out.batch_stride + work.head * p.out.head_stride +
           (work.q_token + token) * p.out.token_stride;
  };
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int block_row = warp_row + lane / 4 + row * 8;
    const int token = first_row + lane / 4 + row * 8;
    const bool inside = token < work.qo_len;
    const float sum = sum_of_quad(rows.sum[row]);
    // A row that sees no key is zero.
    inverse[row] = sum == 0.0f ? 0.0f : ptx::rcp(sum);
    if (p.lse != nullptr && lane % 4 == 0 && inside) {
      constexpr float kLn2 = 0.6931471805599453f;
      const float log_sum = rows.reference[row] + ptx::lg2(sum) + shared.at<float>(Shared::kQShift)[block_row];
      p.lse[work.lse + token] = sum == 0.0f ? -INFINITY : log_sum * kLn2;
    }
    if constexpr (!Staged) {
      uint16_t* destination = row_pointer(token);
#pragma unroll
      for (int group = 0; group < Config::kHeadDim / 32; ++group) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = (group * 4 + i) * 4 + row * 2;  // of a group of 8 channels
          pairs[i] = Pair<Config::Element>::pack(out[at] * inverse[row], out[at + 1] * inverse[row]);
        }
        transpose_quad(pairs);
        const int channel = (group * 4 + lane % 4) * 8;
        // Channels come in eights: the copy engine reads no other V.
        if (inside && channel < p.v_head_dim) {
          *reinterpret_cast<uint4*>(destination + channel) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
      }
    }
  }
  if constexpr (Staged) {
    const int stage = Shared::kOut + warp_row / 16 * Config::kOutBytes;
    store_rows<Config::Element, Config::kHeadDim>(out, inverse, row_pointer(first_row), p.out.token_stride, work.qo_len - first_row, p.v_head_dim,
                                                  shared.at<uint8_t>(stage), shared.address + stage);
  }
}

}  // namespace sage
