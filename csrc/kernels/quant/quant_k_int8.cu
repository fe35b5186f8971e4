// K -> INT8, smoothed, in one pass and one launch. A block of threads handles spans of 128 keys of one head: it estimates the mean of K
// from a sample of keys (each block reads the same sample, so all agree), subtracts it, divides large channels, and scales each group of 16 keys by
// its largest magnitude.
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/quant/channel_factors.cuh"
#include "kernels/quant/kv_span.cuh"
#include "kernels/quant/quant_k_int8.h"
#include "kernels/swizzle.cuh"

namespace sage {

struct Config : QuantKInt8 {
  using Element = SAGE_DTYPE;
  static constexpr int kHeadDim = SAGE_HEAD_DIM;
  static constexpr int kThreadsPerKey = 16;
  static constexpr int kChannels = kHeadDim / kThreadsPerKey;  // per thread
  static constexpr int kWarps = kThreads / 32;
  // Half of the threads take the span's first block, half its second, eight keys a pass. So a warp sees two neighbouring
  // keys in each pass, the same pair modulo 8 every time: exactly one scale group.
  static constexpr int kPasses = kBlockN / 8;
  static constexpr int kRowBytes = kHeadDim < 128 ? kHeadDim : 128;  // of a panel
  static_assert(kThreads / 2 / kThreadsPerKey == 8 && kWarps == 2 * kGroups);
  // Blocks of threads that the registers of a multiprocessor shall hold. From 10.0 on CUDA 12 needs more for the same.
#if __CUDA_ARCH__ >= 1000
  static constexpr int kBlocksPerSm = kHeadDim <= 128 ? 3 : 1;
#else
  static constexpr int kBlocksPerSm = kHeadDim <= 128 ? 4 : 1;
#endif
};

// Bytes that are written at once.
template <int Bytes>
struct alignas(Bytes) Packed {
  uint32_t words[Bytes / 4];
};

// What pairs of K's channels are multiplied by, and what is added then; in shared memory.
struct Centring {
  alignas(32) uint32_t factor[Config::kHeadDim / 2];
  alignas(32) uint32_t shift[Config::kHeadDim / 2];
};

// Quantises a span, given the head's first token.
__device__ __forceinline__ void quantise(const Config::Params& p, const Config::Element* k, int length, int first_span_key, int64_t index,
                                         const SeenByQueries& seen, const Centring& centring) {
  using Element = Config::Element;
  constexpr int kChannels = Config::kChannels;
  const int block = threadIdx.x / 128;
  const int row = threadIdx.x % 128 / Config::kThreadsPerKey;  // of the block, in its first pass
  const int first_key = first_span_key + block * Config::kBlockN + row;
  const int channel = threadIdx.x % Config::kThreadsPerKey * kChannels;

  // Past the last key the last one of the same group again, if there is one: nobody sees such, and no scale shall be other for them.
  uint32_t keys[Config::kPasses][kChannels / 2];
  const int count = (length - first_key + 7) / 8;
  const Element* next = k + static_cast<int64_t>(min(first_key, length - 1)) * p.k.token_stride;
  const auto key = [&](int pass) {
    const Element* here = next;
    if (pass + 1 < count) next += 8 * p.k.token_stride;
    return here;
  };
  constexpr uint32_t kAll = 0x11111111;  // SeenKeys::bit of each pass
  uint32_t seen_keys = kAll;
  if (seen.words != nullptr && first_key - row < length) seen_keys = seen.word(first_key) >> SeenKeys::bit(row);
  load_rows<kChannels>(keys, key, channel, p.head_dim, p.k.aligned16);

  // Of the difference rounding to Element will do: it is finer than 8 bits. Halves, since that of two large keys need not fit Element.
  const auto* factor = reinterpret_cast<const Packed<kChannels * 2>*>(centring.factor + channel / 2)->words;
  const auto* shift = reinterpret_cast<const Packed<kChannels * 2>*>(centring.shift + channel / 2)->words;
#pragma unroll
  for (int pass = 0; pass < Config::kPasses; ++pass) {
#pragma unroll
    for (int i = 0; i < kChannels / 2; ++i) keys[pass][i] = Pair<Element>::multiply_add(keys[pass][i], factor[i], shift[i]);
  }
  if ((seen_keys & kAll) != kAll) {
#pragma unroll
    for (int pass = 0; pass < Config::kPasses; ++pass) {
#pragma unroll
      for (int i = 0; i < kChannels / 2; ++i) keys[pass][i] = seen_keys >> SeenKeys::bit(pass * 8) & 1 ? keys[pass][i] : 0;
    }
  }
  uint32_t largest = 0;
#pragma unroll
  for (int pass = 0; pass < Config::kPasses; ++pass) {
#pragma unroll
    for (int i = 0; i < kChannels / 2; ++i) largest = Pair<Element>::larger_magnitude(largest, keys[pass][i]);
  }
  const float2 largest_pair = Pair<Element>::unpack(largest);
  // Positive, so that the scale of zeros is.
  float magnitude = ptx::max_nan(1e-14f, ptx::max_nan(largest_pair.x, largest_pair.y));
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) {
    magnitude = ptx::max_nan(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, lane));
  }

  const int64_t block_index = index * 2 + block;
  const float inverse = ptx::divide(127.0f, magnitude);
  // Eight rows further the swizzle is the same.
  int8_t* out = p.k_int8 + block_index * Config::kBlockN * Config::kHeadDim +
                swizzled_in_panels<Config::kHeadDim, Config::kBlockN>(row, channel / 16) + channel % 16;
  int squares[Config::kPasses];
#pragma unroll
  for (int pass = 0; pass < Config::kPasses; ++pass) {
    float x[kChannels];
    unpack<Element>(x, keys[pass]);
    Packed<kChannels> packed;
    squares[pass] = 0;
#pragma unroll
    for (int i = 0; i < kChannels / 4; ++i) {
      packed.words[i] = pack_s8x4({x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]}, inverse);
      squares[pass] = __dp4a(static_cast<int>(packed.words[i]), static_cast<int>(packed.words[i]), squares[pass]);
    }
    *reinterpret_cast<Packed<kChannels>*>(out + pass * 8 * Config::kRowBytes) = packed;
  }
  int largest_square = sums_of_16_lanes(squares);
#pragma unroll
  for (int lane = 16; lane >= Config::kThreadsPerKey / Config::kPasses; lane /= 2) {
    largest_square = max(largest_square, __shfl_xor_sync(0xffffffffu, largest_square, lane));
  }
  if (threadIdx.x % 32 == 0) {
    float* scales = p.k_scale + block_index * Config::kScales + threadIdx.x / 32 % Config::kGroups;
    const float scale = scale_of(magnitude, 2.0f / 127.0f);
    scales[0] = scale;
    scales[Config::kGroups] = scale * ptx::sqrt(static_cast<float>(largest_square));
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    quant_k_int8(const __grid_constant__ Config::Params p) {
  using Element = Config::Element;
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  if (p.next_tile != nullptr && blockIdx.x == 0) {
    if (threadIdx.x == 0) *p.next_tile = p.first_tile;
    for (int i = threadIdx.x; i < p.zeros; i += Config::kThreads) p.next_tile[1 + i] = 0;
  }

  const KvSpan span(p.cu_seqlens, p.cu_seqlens_q, p.sequences, p.kv_heads, p.kv_len, Config::kSpanN, p.together, p.lots);
  if (span.first_key >= span.length) return;
  const SeenByQueries seen(p.seen, span.batch);
  __shared__ Sample<Config::kHeadDim, Config::kThreads> sample;
  __shared__ int powers[Config::kHeadDim];
  __shared__ Centring centring;
  bool scaled = false;
  if (p.k_mean != nullptr) {
    take_sample<Config::kSampledKeys, true, Element>(p.k, span, p.head_dim, seen, sample);
    scaled = find_factors<Element>(p, span, sample, powers);
    if (span.first_key == 0 && threadIdx.x == 0) p.scaled[span.mean] = scaled;
  }
  if (threadIdx.x < Config::kHeadDim / 2) {
    const int channel = 2 * threadIdx.x;
    const int exponents[2] = {scaled ? powers[channel] : 0, scaled ? powers[channel + 1] : 0};
    float2 mean = make_float2(0.0f, 0.0f);
    if (p.k_mean != nullptr) {
      mean = Pair<Element>::unpack(Pair<Element>::pack(sample.mean[channel], sample.mean[channel + 1]));
      if (span.first_key == 0) {
        const int64_t written = span.mean * Config::kHeadDim + channel;
        *reinterpret_cast<float2*>(p.k_mean + written) = mean;
        if (scaled) {
          constexpr int kMost = Config::kMostPowers;
          *reinterpret_cast<float2*>(p.q_factor + written) = make_float2(power_of_two(exponents[0] - kMost), power_of_two(exponents[1] - kMost));
        }
      }
    }
    const float2 by = make_float2(power_of_two(-1 - exponents[0]), power_of_two(-1 - exponents[1]));
    centring.factor[threadIdx.x] = Pair<Element>::pack(by.x, by.y);
    centring.shift[threadIdx.x] = Pair<Element>::pack(-mean.x * by.x, -mean.y * by.y);
  }
  __syncthreads();
  const Element* k = row_pointer<Element>(p.k, span.batch, span.head, span.first_token);
  int64_t index = span.index;
#pragma unroll 1
  for (int key = span.first_key; key < span.end_key; key += Config::kSpanN) quantise(p, k, span.length, key, index++, seen, centring);
}

}  // namespace sage
