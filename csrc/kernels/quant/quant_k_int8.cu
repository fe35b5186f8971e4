// K -> INT8, smoothed, in one pass and one launch. A block of threads handles spans of 128 keys of one head: it estimates the mean of K
// from a sample of keys (each block reads the same sample, so all agree), subtracts it, rotates what is large in few channels, and scales each group of 16
// keys by its largest magnitude.
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/quant/channel_factors.cuh"
#include "kernels/quant/kv_span.cuh"
#include "kernels/quant/quant_k_int8.h"
#include "kernels/quant/rotate_keys.cuh"
#include "kernels/rotate.cuh"
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
  // Blocks of threads that the registers of a multiprocessor shall hold.
  static constexpr int kBlocksPerSm = kHeadDim <= 128 ? 3 : 1;
};

// Bytes that are written at once.
template <int Bytes>
struct alignas(Bytes) Packed {
  uint32_t words[Bytes / 4];
};

// What is done to K's channels before they are quantised; in shared memory, for want of registers.
struct Centring {
  bool rotated;
  // In pairs the mean's half, negative, which is added to half of K; or, of a head that is rotated, its channels' factors.
  alignas(32) uint32_t shift_or_factors[Config::kHeadDim / 2];
  alignas(32) float rotated_shift[Config::kHeadDim];  // what is added to rotated channels
};

using Rotation = KeyRotation<Config::Element, Config::kHeadDim>;

// Quantises a span, given the head's first token.
__device__ __forceinline__ void quantise(const Config::Params& p, const Config::Element* k, int length, int first_span_key, int64_t index,
                                         int batch, const Centring& centring, Rotation::Stage& stage) {
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
  const SeenByQueries seen(p.seen, batch);
  uint32_t seen_keys = kAll;
  if (seen.words != nullptr && first_key - row < length) seen_keys = seen.word(first_key) >> SeenKeys::bit(row);
  load_rows<kChannels>(keys, key, channel, p.head_dim, p.k.aligned16);

  // Of the difference rounding to Element will do: it is finer than 8 bits. Halves, since that of two large keys need not fit Element.
  if (__builtin_expect(!centring.rotated, 1)) {
    const uint32_t half = Pair<Element>::pack(0.5f, 0.5f);
    const auto* shift = reinterpret_cast<const Packed<kChannels * 2>*>(centring.shift_or_factors + channel / 2)->words;
#pragma unroll
    for (int pass = 0; pass < Config::kPasses; ++pass) {
#pragma unroll
      for (int i = 0; i < kChannels / 2; ++i) keys[pass][i] = Pair<Element>::multiply_add(keys[pass][i], half, shift[i]);
    }
  } else {
    Rotation::rotate(keys, centring.shift_or_factors, centring.rotated_shift, stage);
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
  float magnitude = ptx::max_nan(kSmallestMagnitude, ptx::max_nan(largest_pair.x, largest_pair.y));
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

  const KvSpan span(p);
  if (span.first_key >= span.length) return;
  __shared__ Centring centring;
  __shared__ union {
    struct {  // first
      Sample<Config::kHeadDim, Config::kThreads> of_k;
      SampleOfQ<Config::kHeadDim> of_q;
      int powers[Config::kHeadDim];
    } samples;
    Rotation::Stage stages[Config::kWarps];
  } shared;
  auto& sample = shared.samples.of_k;
  auto& sample_of_q = shared.samples.of_q;
  auto& powers = shared.samples.powers;
  bool rotated = false;
  if (p.k_mean != nullptr) {
    const bool large_in_q = take_sample<Config::kSampledKeys, true, Element>(p.k, span, p.head_dim, SeenByQueries(p.seen, span.batch), sample,
                                                                             [&] { return take_sample_of_q<Element>(p, span, sample_of_q); });
    rotated = find_factors<Element>(p.head_dim, sample_of_q, large_in_q, sample, powers);
    if (span.first_key == 0 && threadIdx.x == 0) p.rotated[span.mean] = rotated;
  }
  if (threadIdx.x == 0) centring.rotated = rotated;
  if (threadIdx.x < Config::kHeadDim / 2) {
    const int channel = 2 * threadIdx.x;
    float2 mean = make_float2(0.0f, 0.0f);
    if (p.k_mean != nullptr) {
      mean = Pair<Element>::unpack(Pair<Element>::pack(sample.mean[channel], sample.mean[channel + 1]));
      if (span.first_key == 0) {
        const int64_t written = span.mean * Config::kHeadDim + channel;
        *reinterpret_cast<float2*>(p.k_mean + written) = mean;
      }
    }
    if (__builtin_expect(!rotated, 1)) {
      centring.shift_or_factors[threadIdx.x] = Pair<Element>::pack(-0.5f * mean.x, -0.5f * mean.y);
    } else {
      float factors[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        constexpr float kLeast = 1.0f / ((1 << Config::kMostPowers) * kRotatedTogether<Config::kHeadDim>);
        const float least = sign_before_rotation(channel + i) * kLeast;
        factors[i] = 0.5f * least * power_of_two(-powers[channel + i]);
        if (span.first_key == 0) p.q_factor[span.mean * Config::kHeadDim + channel + i] = least * power_of_two(powers[channel + i]);
      }
      centring.shift_or_factors[threadIdx.x] = Pair<Element>::pack(factors[0], factors[1]);
      sample.mean[channel] = -factors[0] * mean.x;  // from here on what is to be rotated
      sample.mean[channel + 1] = -factors[1] * mean.y;
    }
  }
  if (__builtin_expect(rotated, 0)) {
    __syncthreads();
    if (threadIdx.x < Config::kHeadDim) centring.rotated_shift[threadIdx.x] = rotated_channel(sample.mean, threadIdx.x);
  }
  __syncthreads();
  const Element* k = row_pointer<Element>(p.k, span.batch, span.head, span.first_token);
#pragma unroll 1
  for (int i = 0; i < p.together && span.first_key + i * Config::kSpanN < span.length; ++i) {
    quantise(p, k, span.length, span.first_key + i * Config::kSpanN, span.index + i, span.batch, centring, shared.stages[threadIdx.x / 32]);
  }
}

}  // namespace sage
