// A rotation of channels, which Q and K undergo alike, so that no score changes: a Walsh-Hadamard transform, times sqrt(count). What is large in one channel
// is spread over all that are transformed together: those of equal (channel % 16) / 4, which a lane of an attention kernel holds of its rows of Q.
#pragma once

namespace sage {

template <int HeadDim>
constexpr int kRotatedTogether = HeadDim / 4;

// By which signs channels are multiplied before: so that what is alike in all of them is not gathered in one.
__device__ __forceinline__ float sign_before_rotation(int channel) { return __popc(channel & channel >> 4 & 3) % 2 == 0 ? 1.0f : -1.0f; }

// A lane's channels of a row: four, and four again every 16.
template <int N>
__device__ __forceinline__ void rotate_own(float (&x)[N]) {
#pragma unroll
  for (int distance = 1; distance < N; distance *= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i & distance) continue;
      const float sum = x[i] + x[i + distance];
      x[i + distance] = x[i] - x[i + distance];
      x[i] = sum;
    }
  }
}

}  // namespace sage
