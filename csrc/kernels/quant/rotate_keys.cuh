// The rotation of K's channels (rotate.cuh) by tensor cores: a warp multiplies a Hadamard matrix, whose columns have the channels' factors, by its keys. Factors are signs and powers
// of two, so that each product is exact (float16's smallest, 2^-15 at head_dim 256, is a subnormal number); sums are float32, and rounded to Element once.
#pragma once

#include "kernels/element.cuh"
#include "kernels/ptx/mma_sync.cuh"
#include "kernels/rotate.cuh"

namespace sage {

// One channel of what is rotated.
template <int HeadDim>
__device__ __forceinline__ float rotated_channel(const float (&x)[HeadDim], int channel) {
  const int number = channel / 16 * 4 + channel % 4;  // of those that are transformed together
  float sum = 0.0f;
#pragma unroll 8
  for (int i = 0; i < kRotatedTogether<HeadDim>; ++i) {
    const float one = x[i / 4 * 16 + channel % 16 / 4 * 4 + i % 4];
    sum += __popc(i & number) % 2 == 0 ? one : -one;
  }
  return sum;
}

template <typename Element, int HeadDim>
struct KeyRotation {
  // Channels of a class, those of equal (channel % 16) / 4, are rotated together: channel g * 16 + class * 4 + j is number g * 4 + j of them.
  static constexpr int kClasses = 4;
  static constexpr int kTiles = HeadDim / kClasses / 16;  // of a class, by which the matrix has tiles of 16 x 16
  static constexpr int kKeys = 8;                         // of a product
  static constexpr int kRowWords = HeadDim / 2 + 4;       // padded
  using Stage = uint32_t[kKeys][kRowWords];               // on 16 bytes
  // What a lane has of a key: neighbouring channels, HeadDim / 16.
  static constexpr int kWords = HeadDim / 32, kPasses = kKeys / 2;
  struct alignas(kWords < 4 ? kWords * 4 : 16) Channels {
    uint32_t words[kWords];
  };

  // Lanes of a half of the warp have the same key in each pass. factors: Element, two a word. shift: what is added to the rotated channels. stage: the warp's own.
  static __device__ __forceinline__ void rotate(uint32_t (&keys)[2 * kPasses][kWords], const uint32_t* factors, const float* shift, Stage& stage) {
    const int lane = threadIdx.x % 32;
    uint32_t* own = &stage[lane / 16][lane % 16 * kWords];
#pragma unroll
    for (int first = 0; first < 2 * kPasses; first += kPasses) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        *reinterpret_cast<Channels*>(own + pass * 2 * kRowWords) = reinterpret_cast<const Channels&>(keys[first + pass]);
      }
      __syncwarp();
      uint32_t fragments[kClasses][kTiles][2];
#pragma unroll
      for (int i = 0; i < kClasses; ++i) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const uint2 four = *reinterpret_cast<const uint2*>(&stage[lane / 4][(tile * 4 + lane % 4) * 8 + i * 2]);
          fragments[i][tile][0] = four.x;
          fragments[i][tile][1] = four.y;
        }
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kClasses; ++i) rotate_class(fragments[i], factors + i * 2, shift + i * 4, stage, i * 2);
      __syncwarp();
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        reinterpret_cast<Channels&>(keys[first + pass]) = *reinterpret_cast<const Channels*>(own + pass * 2 * kRowWords);
      }
      __syncwarp();
    }
  }

 private:
  // Of a class, whose first channels are the stage's word `first`. The matrix is (-1)^popc(row & column). Its rows are so ordered that a lane, which has rows lane / 4 and
  // 8 further of each product, has neighbouring channels.
  static __device__ __forceinline__ void rotate_class(const uint32_t (&keys)[kTiles][2], const uint32_t* factors, const float* shift, Stage& stage,
                                                      int first) {
    constexpr uint32_t kUpper = 0x80000000u, kBoth = 0x80008000u;  // signs of a word's numbers
    const int lane = threadIdx.x % 32;
    const uint32_t low = __popc(lane % 4 & lane / 8) % 2 * kBoth, high = low ^ lane / 4 % 2 * kBoth;
    uint32_t matrix[kTiles][4];
#pragma unroll
    for (int column = 0; column < kTiles; ++column) {
      const uint2 by = *reinterpret_cast<const uint2*>(factors + (column * 4 + lane % 4) * 8);
      matrix[column][0] = by.x ^ low;
      matrix[column][1] = by.x ^ low ^ kUpper;
      matrix[column][2] = by.y ^ high;
      matrix[column][3] = by.y ^ high ^ kUpper;
    }
#pragma unroll
    for (int row = 0; row < kTiles; ++row) {
      const int word = (row * 4 + lane / 8) * 8 + lane / 4 % 2;
      const float2 start = *reinterpret_cast<const float2*>(shift + word * 2);
      float rotated[4] = {start.x, start.x, start.y, start.y};
#pragma unroll
      for (int column = 0; column < kTiles; ++column) {
        const uint32_t sign = __popc(row & column) % 2 * kBoth;
        const uint32_t tile[4] = {matrix[column][0] ^ sign, matrix[column][1] ^ sign, matrix[column][2] ^ sign, matrix[column][3] ^ sign};
        ptx::mma_m16n8k16_f32<Element>(rotated, tile, keys[column][0], keys[column][1]);
      }
      stage[lane % 4 * 2][word + first] = Pair<Element>::pack(rotated[0], rotated[2]);
      stage[lane % 4 * 2 + 1][word + first] = Pair<Element>::pack(rotated[1], rotated[3]);
    }
  }
};

}  // namespace sage
