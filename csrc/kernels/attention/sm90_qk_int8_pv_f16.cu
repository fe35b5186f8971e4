// Attention with INT8 QK^T and FP16/BF16 PV, float32 accumulation, on Hopper's wgmma.
//
// A persistent block of threads takes tile after tile of 192 output rows. One warpgroup loads, by the copy engine: K (INT8,
// from quant_k_int8) and V (as the caller left it). Three compute, 64 rows each: while one's products run on the tensor
// cores, the others do their softmax, and within each the P V of one tile of keys runs beside the softmax of the next.
#include "kernels/attention/sm90_qk_int8_pv_f16.h"

#include "kernels/element.cuh"
#include "kernels/ptx/cp_async.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/mbarrier.cuh"
#include "kernels/ptx/wgmma.cuh"
#include "kernels/swizzle.cuh"

namespace sage {

struct Config : Sm90QkInt8PvF16 {
  using Element = SAGE_DTYPE;
  static constexpr int kHeadDim = SAGE_HEAD_DIM;
  static constexpr int kTileN = tile_n(kHeadDim);
  static constexpr int kStages = stages(kHeadDim);
  static constexpr int kScaleBytes = scale_bytes(kHeadDim);
  static constexpr int kKTileBytes = kTileN * kHeadDim;
  static constexpr int kVTileBytes = kTileN * kHeadDim * 2;
  // V's rows are cut into panels of 64 channels, the span of the hardware's swizzle.
  static constexpr int kVPanelBytes = kTileN * 128;
  static constexpr int kQkSteps = kHeadDim / 32;
  static constexpr int kPvSteps = kTileN / 16;
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr int kHalves = kTileN / QuantKInt8::kBlockN;  // parts of a tile with scales of their own
  static constexpr int kProducerRegisters = 32;
  static constexpr int kConsumerRegisters = 160;
  static_assert(128 * (kProducerRegisters + kConsumers * kConsumerRegisters) <= 65536);

  // The output is rescaled only when a row's maximum has grown by more than this many powers of two. Until then
  // probabilities may reach 2^8, which P's fp16 holds with its full precision; the final division makes it exact.
  static constexpr float kRescaleThreshold = 8.0f;
};

// Offsets in shared memory.
struct Shared {
  static constexpr int kQ = 0;
  static constexpr int kK = kQ + Config::kBlockM * Config::kHeadDim;
  static constexpr int kV = kK + Config::kStages * Config::kKTileBytes;
  static constexpr int kKScale = kV + Config::kStages * Config::kVTileBytes;
  static constexpr int kQScale = kKScale + Config::kStages * Config::kScaleBytes;
  static constexpr int kQShift = kQScale + Config::kBlockM * 4;
  static constexpr int kKFull = kQShift + Config::kBlockM * 4;
  static constexpr int kKEmpty = kKFull + Config::kStages * 8;
  static constexpr int kVFull = kKEmpty + Config::kStages * 8;
  static constexpr int kVEmpty = kVFull + Config::kStages * 8;
  static constexpr int kTotal = kVEmpty + Config::kStages * 8;
  static_assert(kTotal + 1024 == Config::shared_bytes(Config::kHeadDim));
  static_assert(kK % 1024 == 0 && kV % 1024 == 0 && Config::kKTileBytes % 1024 == 0);
};

// Position in a ring of stages; the phase's parity changes with every round.
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == Config::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// A tile of the output, and how many tiles of keys its rows see.
struct Work {
  int batch;
  int head;
  int kv_head;
  int64_t batch_head;
  int64_t kv_batch_head;
  int first_row;
  int tiles;

  __device__ __forceinline__ Work(const Config::Params& p, int index) {
    const int q_blocks = (p.qo_len + Config::kBlockM - 1) / Config::kBlockM;
    batch_head = index / q_blocks;
    batch = index / q_blocks / p.q_heads;
    head = index / q_blocks % p.q_heads;
    kv_head = head / (p.q_heads / p.kv_heads);
    kv_batch_head = batch * p.kv_heads + kv_head;
    // Last rows first: under a causal mask they have the most keys, and short tiles then fill the end.
    first_row = (q_blocks - 1 - index % q_blocks) * Config::kBlockM;
    const int visible = p.causal ? min(p.kv_len, first_row + Config::kBlockM) : p.kv_len;
    tiles = (visible + Config::kTileN - 1) / Config::kTileN;
  }
};

// The tiles of the output that this block of threads takes, by their index. Rounds go back and forth through the blocks: one
// that had long tiles (late rows under a causal mask) in one round has short ones in the next.
struct Schedule {
  int total;
  int round = 0;
  __device__ __forceinline__ explicit Schedule(const Config::Params& p)
      : total((p.qo_len + Config::kBlockM - 1) / Config::kBlockM * p.q_heads * p.batch) {}
  __device__ __forceinline__ int index() const {
    return round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  }
  // A block may be without a tile in the last round alone.
  __device__ __forceinline__ bool done() const { return index() >= total; }
};

// Starts the copies of one tile of V. A thread copies the same 16-byte chunk of every kRowStep-th row; the step is a
// multiple of the swizzle's period, so one swizzled offset serves them all.
__device__ __forceinline__ void load_v(const Config::Params& p, const Work& work, int tile, uint32_t v_tile) {
  constexpr int kChunks = Config::kHeadDim * 2 / 16;
  constexpr int kRowStep = 128 / kChunks;
  static_assert(kRowStep % 8 == 0);
  const int row = threadIdx.x / kChunks;
  const int chunk = threadIdx.x % kChunks;
  const int key = tile * Config::kTileN + row;
  const auto* source = row_pointer<Config::Element>(p.v, work.batch, work.kv_head, 0) + key * p.v.token_stride + chunk * 8;
  const uint32_t destination = v_tile + chunk / 8 * Config::kVPanelBytes + swizzled<128>(row, chunk % 8);
  // Keys and channels past the end must read as zero: their P is 0, and 0 * NaN would not be.
  if (p.v.aligned16) {
    const int rows = chunk * 8 < p.head_dim ? p.kv_len - key : 0;
#pragma unroll
    for (int i = 0; i < Config::kTileN / kRowStep; ++i) {
      const bool valid = i * kRowStep < rows;
      ptx::cp_async_16(destination + i * kRowStep * 128, valid ? source + i * kRowStep * p.v.token_stride : p.v.data,
                       valid);
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < Config::kTileN / kRowStep; ++i) {
      uint32_t bits[4];
      load_channels<8>(bits, source + i * kRowStep * p.v.token_stride - chunk * 8, chunk * 8,
                       key + i * kRowStep < p.kv_len ? p.head_dim : 0, false);
      ptx::store_shared_16(destination + i * kRowStep * 128, bits);
    }
  }
}

// Waits for a stage of K, then starts the copies of a tile and its scales. One thread.
__device__ __forceinline__ void fetch_k(const Config::Params& p, int64_t tile, const Ring& ring, uint32_t shared) {
  const uint32_t full = shared + Shared::kKFull + ring.stage * 8;
  ptx::mbarrier_wait(shared + Shared::kKEmpty + ring.stage * 8, ring.parity ^ 1);
  ptx::mbarrier_arrive_expect(full, Config::kKTileBytes + Config::kScaleBytes);
  ptx::bulk_copy(shared + Shared::kK + ring.stage * Config::kKTileBytes, p.k_int8 + tile * Config::kKTileBytes,
                 Config::kKTileBytes, full);
  ptx::bulk_copy(shared + Shared::kKScale + ring.stage * Config::kScaleBytes,
                 p.k_scale + tile * (Config::kScaleBytes / 4), Config::kScaleBytes, full);
}

// Loads K and V where the copy engine can read V: one thread starts all copies.
__device__ __forceinline__ void produce(const Config::Params& p, uint32_t shared) {
  const int k_tiles = QuantKInt8::blocks(p.kv_len) / Config::kHalves;
  Ring ring;
  for (Schedule schedule(p); !schedule.done(); ++schedule.round) {
    const Work work(p, schedule.index());
    for (int tile = 0; tile < work.tiles; ++tile, ring.next()) {
      fetch_k(p, work.kv_batch_head * k_tiles + tile, ring, shared);
      const uint32_t full = shared + Shared::kVFull + ring.stage * 8;
      ptx::mbarrier_wait(shared + Shared::kVEmpty + ring.stage * 8, ring.parity ^ 1);
      ptx::mbarrier_arrive_expect(full, Config::kVTileBytes);
#pragma unroll
      for (int panel = 0; panel < Config::kHeadDim / 64; ++panel) {
        ptx::tensor_copy(shared + Shared::kV + ring.stage * Config::kVTileBytes + panel * Config::kVPanelBytes, p.v_map,
                         panel * 64, tile * Config::kTileN, work.kv_head, work.batch, full);
      }
    }
  }
}

// The same where it cannot (rows that do not start on 16 bytes): the warpgroup's threads copy V.
__device__ __forceinline__ void produce_unmapped(const Config::Params& p, uint32_t shared) {
  const int k_tiles = QuantKInt8::blocks(p.kv_len) / Config::kHalves;
  Ring ring, arrived;
  bool pending = false;  // a tile of V is under way
  const auto v_arrives = [&] {
    // The tensor cores read through another proxy than cp.async writes through.
    ptx::proxy_async_fence();
    ptx::mbarrier_arrive(shared + Shared::kVFull + arrived.stage * 8);
    arrived.next();
  };
  for (Schedule schedule(p); !schedule.done(); ++schedule.round) {
    const Work work(p, schedule.index());
    for (int tile = 0; tile < work.tiles; ++tile, ring.next()) {
      if (threadIdx.x == 0) fetch_k(p, work.kv_batch_head * k_tiles + tile, ring, shared);
      __syncwarp();
      ptx::mbarrier_wait(shared + Shared::kVEmpty + ring.stage * 8, ring.parity ^ 1);
      load_v(p, work, tile, shared + Shared::kV + ring.stage * Config::kVTileBytes);
      ptx::cp_async_commit();
      if (pending) {
        ptx::cp_async_wait<1>();
        v_arrives();
      }
      pending = true;
    }
  }
  ptx::cp_async_wait<0>();
  if (pending) v_arrives();
}

// Quantises this warp's 16 rows of Q into shared memory, one scale a row: half a warp reads a row at a time.
__device__ __forceinline__ void load_q(const Config::Params& p, const Work& work, int warp_row, uint8_t* shared) {
  constexpr int kChannels = Config::kHeadDim / 16;
  const int lane = threadIdx.x % 32;
  const int channel = lane % 16 * kChannels;
  uint32_t bits[8][kChannels / 2];
#pragma unroll
  for (int pass = 0; pass < 8; ++pass) {
    const int token = min(work.first_row + warp_row + pass * 2 + lane / 16, p.qo_len - 1);
    load_channels<kChannels>(bits[pass], row_pointer<Config::Element>(p.q, work.batch, work.head, token), channel,
                             p.head_dim, p.q.aligned16);
  }
#pragma unroll
  for (int pass = 0; pass < 8; ++pass) {
    const int row = warp_row + pass * 2 + lane / 16;
    float x[kChannels];
    unpack<Config::Element>(x, bits[pass]);
    float magnitude = 1e-30f;  // keeps the scale of an all-zero row positive
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      x[i] = __fmul_rn(x[i], p.scale_log2);
      magnitude = ptx::max_nan(magnitude, fabsf(x[i]));
    }
#pragma unroll
    for (int other = 8; other > 0; other /= 2) {
      magnitude = ptx::max_nan(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, other));
    }
    if (p.lse != nullptr) {
      // Smoothing took q . mean(K) off every score of this row; log-sum-exp gets it back at the end.
      float shift = 0.0f;
      if (p.k_mean != nullptr) {
        const float* mean = p.k_mean + work.kv_batch_head * Config::kHeadDim + channel;
#pragma unroll
        for (int i = 0; i < kChannels; ++i) shift += x[i] * mean[i];
      }
#pragma unroll
      for (int other = 8; other > 0; other /= 2) shift += __shfl_xor_sync(0xffffffffu, shift, other);
      if (lane % 16 == 0) reinterpret_cast<float*>(shared + Shared::kQShift)[row] = shift;
    }
    if (lane % 16 == 0) reinterpret_cast<float*>(shared + Shared::kQScale)[row] = magnitude / 127.0f;
    const float inverse = 127.0f / magnitude;
    uint8_t* destination = shared + Shared::kQ + swizzled<Config::kHeadDim>(row, channel / 16) + channel % 16;
#pragma unroll
    for (int i = 0; i < kChannels; i += 4) {
      *reinterpret_cast<uint32_t*>(destination + i) = pack_s8x4({x[i], x[i + 1], x[i + 2], x[i + 3]}, inverse);
    }
  }
  ptx::proxy_async_fence();
}

using Scores = int32_t[Config::kTileN / 2];
using Probabilities = uint32_t[Config::kPvSteps][4];  // wgmma A fragments
using Output = float[Config::kHeadDim / 2];

// What a lane keeps of its two rows (lane / 4 and lane / 4 + 8 of the warp's 16) from tile to tile.
struct Rows {
  float q_scale[2];
  float max[2];  // of score * scale, in log2 units; lags behind by up to kRescaleThreshold
  float sum[2];  // this lane's columns only
};

__device__ __forceinline__ void issue_qk(uint32_t q_tile, uint32_t k_tile, Scores& scores) {
  const uint64_t q = ptx::wgmma_descriptor<Config::kHeadDim>(q_tile);
  const uint64_t k = ptx::wgmma_descriptor<Config::kHeadDim>(k_tile);
#pragma unroll
  for (int step = 0; step < Config::kQkSteps; ++step) {
    ptx::wgmma_s8_s8(scores, q + step * 2, k + step * 2, step > 0);
  }
}

__device__ __forceinline__ void issue_pv(const Probabilities& probabilities, uint32_t v_tile, Output& out) {
  const uint64_t v = ptx::wgmma_descriptor_rows_along_n(v_tile, Config::kVPanelBytes);
#pragma unroll
  for (int step = 0; step < Config::kPvSteps; ++step) {
    // 16 rows of 128 bytes further.
    ptx::wgmma_f32<Config::Element>(out, probabilities[step], v + step * (16 * 128 / 16), true);
  }
}

// Replaces the scores by their unnormalised probabilities (as float bits) and adds these to the rows' sums. `before_rescale`
// is called where the output has to be rescaled, before it is touched.
template <bool Masked, typename BeforeRescale>
__device__ __forceinline__ void softmax(const Config::Params& p, int first_key, int first_row, const float* k_scales,
                                        Scores& scores, Rows& rows, Output& out, const BeforeRescale& before_rescale) {
  const int lane = threadIdx.x % 32;
  float k_scale[Config::kHalves];
#pragma unroll
  for (int half = 0; half < Config::kHalves; ++half) k_scale[half] = k_scales[half * QuantKInt8::kScales + lane % 4];
  float scale[2][Config::kHalves];  // by row
  float candidate[2];
  bool exceeded = false;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    int32_t largest[Config::kHalves];
#pragma unroll
    for (int half = 0; half < Config::kHalves; ++half) largest[half] = -(1 << 30);
#pragma unroll
    for (int i = row * 2; i < Config::kTileN / 2; i += 4) {
#pragma unroll
      for (int j = i; j < i + 2; ++j) {
        if constexpr (Masked) {
          const int key = first_key + j / 4 * 8 + lane % 4 * 2 + j % 2;
          // Far below any score, and far enough above the least integer for the arithmetic on it.
          if (key >= p.kv_len || (p.causal && key > first_row + row * 8 + lane / 4)) scores[j] = -(1 << 30);
        }
        largest[i / 32] = max(largest[i / 32], scores[j]);
      }
    }
    candidate[row] = -INFINITY;
#pragma unroll
    for (int half = 0; half < Config::kHalves; ++half) {
      scale[row][half] = rows.q_scale[row] * k_scale[half];
      candidate[row] = fmaxf(candidate[row], static_cast<float>(largest[half]) * scale[row][half]);
    }
    exceeded |= candidate[row] > rows.max[row] + Config::kRescaleThreshold;
  }
  if (__any_sync(0xffffffffu, exceeded)) {
    before_rescale();
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float largest = candidate[row];
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const bool grown = largest > rows.max[row] + Config::kRescaleThreshold;
      const float factor = grown ? ptx::ex2(rows.max[row] - largest) : 1.0f;
      if (grown) rows.max[row] = largest;
      rows.sum[row] *= factor;
#pragma unroll
      for (int i = row * 2; i < Config::kHeadDim / 2; i += 4) {
        out[i] *= factor;
        out[i + 1] *= factor;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < Config::kTileN / 2; ++i) {
    const int row = i / 2 % 2;
    float exponent = static_cast<float>(scores[i]) * scale[row][i / 32] - rows.max[row];
    if (Masked && scores[i] == -(1 << 30)) exponent = -INFINITY;
    const float probability = ptx::ex2(exponent);
    rows.sum[row] += probability;
    scores[i] = __float_as_int(probability);
  }
}

__device__ __forceinline__ void pack(const Scores& scores, Probabilities& probabilities) {
#pragma unroll
  for (int i = 0; i < Config::kTileN / 4; ++i) {
    // Two groups of 8 columns are a 16-key step: registers row, row + 8 of the first, then of the second.
    probabilities[i / 4][i % 4] =
        Pair<Config::Element>::pack(__int_as_float(scores[2 * i]), __int_as_float(scores[2 * i + 1]));
  }
}

__device__ __forceinline__ void store_out(const Config::Params& p, const Work& work, int warp_row, const Rows& rows,
                                          const Output& out, const uint8_t* shared) {
  const int lane = threadIdx.x % 32;
  const int first = work.first_row + warp_row + lane / 4;
  float inverse[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float sum = rows.sum[row];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    inverse[row] = 1.0f / sum;
    if (p.lse != nullptr && lane % 4 == 0 && first + row * 8 < p.qo_len) {
      constexpr float kLn2 = 0.6931471805599453f;
      const float shift = reinterpret_cast<const float*>(shared + Shared::kQShift)[warp_row + row * 8 + lane / 4];
      p.lse[work.batch_head * p.qo_len + first + row * 8] = (rows.max[row] + ptx::lg2(sum) + shift) * kLn2;
    }
  }
  auto* destination = static_cast<uint16_t*>(p.out.data) + work.batch * p.out.batch_stride +
                      work.head * p.out.head_stride + first * p.out.token_stride + lane % 4 * 2;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    if (first + row * 8 >= p.qo_len) continue;
#pragma unroll
    for (int d = 0; d < Config::kHeadDim / 8; ++d) {
      const uint32_t pair = Pair<Config::Element>::pack(out[d * 4 + row * 2] * inverse[row],
                                                        out[d * 4 + row * 2 + 1] * inverse[row]);
      const int channels = p.head_dim - d * 8 - lane % 4 * 2;
      uint16_t* element = destination + row * 8 * p.out.token_stride + d * 8;
      if (p.out.aligned16) {
        if (channels > 0) *reinterpret_cast<uint32_t*>(element) = pair;
      } else {
        if (channels > 0) element[0] = pair;
        if (channels > 1) element[1] = pair >> 16;
      }
    }
  }
}

__device__ __forceinline__ void consume(const Config::Params& p, uint8_t* shared_pointer, uint32_t shared) {
  // The same in all lanes, which the compiler knows of a shuffle's result: what derives from it takes uniform registers.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int group = warp / 4 - 1;
  const int lane = threadIdx.x % 32;
  const int warp_row = warp * 16 - 64;  // in the block's kBlockM rows
  const uint32_t q_tile = shared + Shared::kQ + group * 64 * Config::kHeadDim;
  const auto release = [&](int barriers, int stage) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(shared + barriers + stage * 8);
  };
  Scores scores;
  Probabilities probabilities;
  Output out;
  Rows rows;
  Ring k_ring, v_ring;
  for (Schedule schedule(p); !schedule.done(); ++schedule.round) {
    const Work work(p, schedule.index());
    load_q(p, work, warp_row, shared_pointer);
    ptx::named_barrier(1 + group, 128);
    const float* row_scale = reinterpret_cast<const float*>(shared_pointer + Shared::kQScale) + warp_row + lane / 4;
    // Tiles in which every row of this warpgroup sees every key.
    const int full_tiles = (p.causal ? min(p.kv_len, work.first_row + group * 64 + 1) : p.kv_len) / Config::kTileN;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      rows.q_scale[row] = row_scale[row * 8];
      rows.max[row] = -INFINITY;
      rows.sum[row] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 2; ++i) out[i] = 0.0f;

    const auto start_qk = [&] {
      ptx::mbarrier_wait(shared + Shared::kKFull + k_ring.stage * 8, k_ring.parity);
      ptx::wgmma_hold(scores);
      ptx::wgmma_fence();
      issue_qk(q_tile, shared + Shared::kK + k_ring.stage * Config::kKTileBytes, scores);
      ptx::wgmma_commit();
    };
    const auto start_pv = [&] {
      ptx::mbarrier_wait(shared + Shared::kVFull + v_ring.stage * 8, v_ring.parity);
      ptx::wgmma_hold(out);
      ptx::wgmma_fence();
      issue_pv(probabilities, shared + Shared::kV + v_ring.stage * Config::kVTileBytes, out);
      ptx::wgmma_commit();
    };
    const auto finish_pv = [&] {
      ptx::wgmma_wait<0>();
      ptx::wgmma_hold(out);
    };
    const auto run_softmax = [&](int tile, const auto& before_rescale) {
      ptx::wgmma_hold(scores);
      const auto* k_scales = reinterpret_cast<const float*>(shared_pointer + Shared::kKScale + k_ring.stage * Config::kScaleBytes);
      const int first_row = work.first_row + warp_row;
      if (tile < full_tiles) {
        softmax<false>(p, tile * Config::kTileN, first_row, k_scales, scores, rows, out, before_rescale);
      } else {
        softmax<true>(p, tile * Config::kTileN, first_row, k_scales, scores, rows, out, before_rescale);
      }
      release(Shared::kKEmpty, k_ring.stage);
      k_ring.next();
    };

    start_qk();
    ptx::wgmma_wait<0>();
    run_softmax(0, [] {});
    pack(scores, probabilities);
#pragma unroll 1
    for (int tile = 1; tile < work.tiles; ++tile) {
      start_qk();
      start_pv();
      ptx::wgmma_wait<1>();
      run_softmax(tile, finish_pv);
      finish_pv();
      release(Shared::kVEmpty, v_ring.stage);
      v_ring.next();
      pack(scores, probabilities);
    }
    start_pv();
    finish_pv();
    release(Shared::kVEmpty, v_ring.stage);
    v_ring.next();
    store_out(p, work, warp_row, rows, out, shared_pointer);
    // Before the next tile's Q overwrites what slower warps of the group still read of this one's.
    ptx::named_barrier(1 + group, 128);
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1)
    sm90_qk_int8_pv_f16(const __grid_constant__ Config::Params p) {
  extern __shared__ uint8_t unaligned[];
  uint8_t* shared_pointer = unaligned + (1024 - ptx::shared_address(unaligned) % 1024) % 1024;
  const uint32_t shared = ptx::shared_address(shared_pointer);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(shared + Shared::kKFull + stage * 8, 1);
      ptx::mbarrier_init(shared + Shared::kVFull + stage * 8, p.v_mapped ? 1 : 128);
      ptx::mbarrier_init(shared + Shared::kKEmpty + stage * 8, Config::kConsumerWarps);
      ptx::mbarrier_init(shared + Shared::kVEmpty + stage * 8, Config::kConsumerWarps);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  // Who reads what quant_k_int8 writes waits for it: the loading warpgroup, and the others for K's mean.
  if (threadIdx.x < 128 || p.lse != nullptr) ptx::grid_dependency_wait();
  if (threadIdx.x < 128) {
    ptx::registers_release<Config::kProducerRegisters>();
    if (!p.v_mapped) {
      produce_unmapped(p, shared);
    } else if (threadIdx.x == 0) {
      produce(p, shared);
    }
  } else {
    ptx::registers_acquire<Config::kConsumerRegisters>();
    consume(p, shared_pointer, shared);
  }
}

}  // namespace sage
