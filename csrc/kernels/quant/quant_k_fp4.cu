// K -> e2m1, smoothed as quant_k_int8 does it, with a scale for each 16 channels of a key and a unit for a block of 64 keys.
#include "kernels/quant/quant_k_fp4.h"

#include "kernels/ptx/grid.cuh"
#include "kernels/quant/fp4.cuh"
#include "kernels/quant/kv_span.cuh"
#include "kernels/swizzle.cuh"

namespace sage {

struct Config : QuantKFp4 {
  using Element = SAGE_DTYPE;
  static constexpr int kHeadDim = SAGE_HEAD_DIM;
  static constexpr int kThreadsPerKey = kHeadDim / 8;
  // Half of the threads take a span's first block, half its second.
  static constexpr int kKeysPerPass = kThreads / 2 / kThreadsPerKey;
  static constexpr int kPasses = kBlockN / kKeysPerPass;
};

// Quantises a span, given half of K's mean of this thread's channels.
__device__ __forceinline__ void quantise(const Config::Params& p, const KvSpan& span, int first_span_key, int64_t index, const float (&half_mean)[8]) {
  using Element = Config::Element;
  __shared__ float magnitudes[2][Config::kThreads / 32];
  const int block = threadIdx.x / 128;
  const int row = threadIdx.x % 128 / Config::kThreadsPerKey;  // of the block, in its first pass
  const int first_key = first_span_key + block * Config::kBlockN + row;
  const int channel = threadIdx.x % Config::kThreadsPerKey * 8;

  uint32_t keys[Config::kPasses][4];
  const auto* k = row_pointer<Element>(p.k, span.batch, span.head, span.first_token);
  const auto key = [&](int pass) { return k + min(first_key + pass * Config::kKeysPerPass, span.length - 1) * p.k.token_stride; };
  load_rows<8>(keys, key, channel, p.head_dim, p.k.aligned16);

  // Halves, since the difference of two large keys need not be a number.
  const auto difference = [&](float(&x)[8], int pass) {
    unpack<Element>(x, keys[pass]);
    const bool there = first_key + pass * Config::kKeysPerPass < span.length;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = there ? x[i] * 0.5f - half_mean[i] : 0.0f;
  };
  float magnitude = Fp4::kSmallest;
#pragma unroll
  for (int pass = 0; pass < Config::kPasses; ++pass) {
    float x[8];
    difference(x, pass);
#pragma unroll
    for (int i = 0; i < 8; ++i) magnitude = larger_finite(magnitude, x[i]);
  }
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) magnitude = fmaxf(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, lane));
  // Which of the two alternates, so that one barrier does.
  float(&mine)[Config::kThreads / 32] = magnitudes[index % 2];
  if (threadIdx.x % 32 == 0) mine[threadIdx.x / 32] = magnitude;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < 4; ++warp) magnitude = fmaxf(magnitude, mine[block * 4 + warp]);

  const float inverse = Fp4::kLargest / magnitude;
  uint8_t* out = p.k_fp4 + (index * 2 + block) * Fp4::k_block(Config::kHeadDim);
  uint8_t* scales = out + Fp4::k_codes(Config::kHeadDim);
#pragma unroll
  for (int pass = 0; pass < Config::kPasses; ++pass) {
    const int to = row + pass * Config::kKeysPerPass;
    float x[8], scale[1];
    difference(x, pass);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= inverse;
    const uint32_t codes = quantise_fp4(x, OfTwoLanes{}, scale);
    *reinterpret_cast<uint32_t*>(out + swizzled<Config::kHeadDim / 2>(to, channel / 32) + channel / 2 % 16) = codes;
    if (threadIdx.x % 2 == 0) {
      scales[to * (Config::kHeadDim / Fp4::kGroup) + channel / Fp4::kGroup] = ptx::pack_e4m3x4(scale[0], 0.0f, 0.0f, 0.0f);
    }
  }
  if (threadIdx.x % 128 == 0) *reinterpret_cast<float*>(scales + Fp4::k_scales(Config::kHeadDim)) = scale_of(magnitude, 2.0f / Fp4::kLargest);
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kHeadDim <= 128 ? 2 : 1)
    quant_k_fp4(const __grid_constant__ Config::Params p) {
  using Element = Config::Element;
  ptx::grid_dependency_launch();

  const KvSpan span(p.cu_seqlens, p.sequences, p.kv_heads, p.kv_len, Config::kSpanN, p.together);
  if (span.first_key >= span.length) return;
  float half_mean[8] = {};
  if (p.k_mean != nullptr) {
    __shared__ Sample<Config::kHeadDim, Config::kThreads> sample;
    take_sample<Config::kSampledKeys, false, Element>(p.k, span, p.head_dim, sample);
    const int channel = threadIdx.x % Config::kThreadsPerKey * 8;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float2 mean = Pair<Element>::unpack(Pair<Element>::pack(sample.mean[channel + i], sample.mean[channel + i + 1]));
      half_mean[i] = mean.x * 0.5f;
      half_mean[i + 1] = mean.y * 0.5f;
      if (span.first_key == 0 && threadIdx.x < Config::kThreadsPerKey) {
        float* k_mean = p.k_mean + span.mean * Config::kHeadDim + channel + i;
        k_mean[0] = mean.x;
        k_mean[1] = mean.y;
      }
    }
  }
  int64_t index = span.index;
#pragma unroll 1
  for (int key = span.first_key; key < span.end_key; key += Config::kSpanN) quantise(p, span, key, index++, half_mean);
}

}  // namespace sage
