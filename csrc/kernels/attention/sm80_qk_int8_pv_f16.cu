// Attention with INT8 QK^T and FP16/BF16 PV, float32 accumulation, on mma.sync (sm_80 on).
//
// A block of four warps computes 128 rows of the output; a warp owns 32 of them and keeps Q (quantised in registers, one
// scale a row), the scores of a few keys and the output in registers. K (INT8, from quant_k_int8) and V (as the caller
// left it) stream through shared memory, 64 keys a stage, double buffered with cp.async.
#include "kernels/attention/sm80_qk_int8_pv_f16.h"

#include "kernels/element.cuh"
#include "kernels/ptx/cp_async.cuh"
#include "kernels/ptx/grid.cuh"
#include "kernels/ptx/ldmatrix.cuh"
#include "kernels/ptx/math.cuh"
#include "kernels/ptx/mma_sync.cuh"
#include "kernels/quant/quant_k_int8.h"
#include "kernels/swizzle.cuh"

namespace sage {

struct Config : Sm80QkInt8PvF16 {
  using Element = SAGE_DTYPE;
  static constexpr int kHeadDim = SAGE_HEAD_DIM;
  // Keys whose scores are in registers at a time: all of a stage's where there is room, else what spills nothing.
  // Measured on an H200, as are the alternatives: bench/notes.md.
  static constexpr int kChunkN = kHeadDim <= 64 ? 64 : 16;
  static constexpr int kMTiles = kWarpM / 16;
  static constexpr int kNTiles = kChunkN / 8;
  static constexpr int kRows = 2 * kMTiles;  // rows of which a lane holds a part: lane / 4 + 8 * row
  static constexpr int kQkSteps = kHeadDim / 32;
  static constexpr int kPvSteps = kChunkN / 16;
  static constexpr int kOTiles = kHeadDim / 8;

  static constexpr int kKRowBytes = kHeadDim;
  static constexpr int kVRowBytes = kHeadDim * 2;
  static constexpr int kKTileBytes = kBlockN * kKRowBytes;
  static constexpr int kVTileBytes = kBlockN * kVRowBytes;
  static constexpr int kStageBytes = kKTileBytes + kVTileBytes;
  static_assert(kStages * kStageBytes == shared_bytes(kHeadDim));
  static_assert(kBlockN == QuantKInt8::kBlockN, "one set of K scales a stage");

  // The int32 accumulators of QK^T start at the bits of 1.5 * 2^23, so that they read as that float plus the score:
  // |score| <= 127 * 127 * kHeadDim < 2^22 stays in the mantissa. The constant then folds into the softmax's FMA.
  static constexpr int32_t kMagicBits = 0x4B400000;
  static constexpr float kMagic = 12582912.0f;
  static_assert(127 * 127 * kHeadDim < (1 << 22));

  // The output is rescaled only when a row's maximum has grown by more than this many powers of two. Until then
  // probabilities may reach 2^8, which P's fp16 holds with its full precision; the final division makes it exact.
  static constexpr float kRescaleThreshold = 8.0f;
};

// Which part of the output this block of threads computes. Cheap to derive, so that the epilogue derives it again rather
// than hold registers through the main loop.
struct Tile {
  int batch;
  int head;
  int kv_head;
  int64_t batch_head;
  int64_t kv_batch_head;
  int first_row;
  int warp_row;

  __device__ __forceinline__ explicit Tile(const Config::Params& p) {
    const int index = ptx::block_index_x();
    const int q_blocks = (p.qo_len + Config::kBlockM - 1) / Config::kBlockM;
    batch_head = index / q_blocks;
    batch = index / q_blocks / p.q_heads;
    head = index / q_blocks % p.q_heads;
    kv_head = head / (p.q_heads / p.kv_heads);
    kv_batch_head = batch * p.kv_heads + kv_head;
    // Last rows first: under a causal mask they have the most keys, and short blocks then fill the tail.
    first_row = (q_blocks - 1 - index % q_blocks) * Config::kBlockM;
    warp_row = first_row + threadIdx.x / 32 * Config::kWarpM;
  }
};

struct State {
  float out[Config::kMTiles][Config::kOTiles][4];
  float row_max[Config::kRows];  // of score * scale, in log2 units; lags behind by up to kRescaleThreshold
  float row_sum[Config::kRows];  // this lane's columns only
};

// Quantises the warp's 32 rows of Q straight into mma A fragments, one scale a row.
__device__ __forceinline__ void load_q(const Config::Params& p, const Tile& tile,
                                       uint32_t (&q)[Config::kMTiles][Config::kQkSteps][4],
                                       float (&q_scale)[Config::kRows]) {
  constexpr int kPieces = Config::kQkSteps * 2;  // of 4 channels, every 16 channels
  const int lane = threadIdx.x % 32;
  uint32_t bits[Config::kRows][kPieces][2];
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
    const int token = min(tile.warp_row + row * 8 + lane / 4, p.qo_len - 1);
    const auto* source = row_pointer<Config::Element>(p.q, tile.batch, tile.head, token);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      load_channels<4>(bits[row][i], source, i * 16 + lane % 4 * 4, p.head_dim, p.q.aligned16);
    }
  }
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
    const int token = tile.warp_row + row * 8 + lane / 4;
    float x[kPieces][4];
    float magnitude = 1e-30f;  // keeps the scale of an all-zero row positive
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      unpack<Config::Element>(x[i], bits[row][i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[i][j] = __fmul_rn(x[i][j], p.scale_log2);
        magnitude = ptx::max_nan(magnitude, fabsf(x[i][j]));
      }
    }
    magnitude = ptx::max_nan(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, 1));
    magnitude = ptx::max_nan(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, 2));

    if (p.lse != nullptr && p.k_mean != nullptr) {
      // Smoothing took q . mean(K) off every score of this row; log-sum-exp gets it back at the end.
      const float* mean = p.k_mean + static_cast<int64_t>(tile.kv_batch_head) * Config::kHeadDim + lane % 4 * 4;
      float shift = 0.0f;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) shift += x[i][j] * mean[i * 16 + j];
      }
      shift += __shfl_xor_sync(0xffffffffu, shift, 1);
      shift += __shfl_xor_sync(0xffffffffu, shift, 2);
      if (lane % 4 == 0 && token < p.qo_len) p.lse[tile.batch_head * p.qo_len + token] = shift;
    }

    const float inverse = 127.0f / magnitude;
    q_scale[row] = magnitude / 127.0f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      // Fragment register: bit 0 chooses row + 8, bit 1 the upper 16 channels of the step.
      q[row / 2][i / 2][row % 2 + i % 2 * 2] = pack_s8x4(x[i], inverse);
    }
  }
}

// Streams K and V, a block of 64 keys at a time, into the stages. Of V, a thread copies the same 16-byte chunk of every
// kVRowStep-th row; the step is a multiple of the swizzle's period, so one swizzled offset serves them all.
struct Loader {
  static constexpr int kVChunks = Config::kVRowBytes / 16;
  static constexpr int kVRowStep = Config::kThreads / kVChunks;
  static_assert(kVRowStep % 8 == 0);

  const int8_t* k;
  const Config::Element* v;
  uint32_t v_offset;

  __device__ __forceinline__ Loader(const Config::Params& p, const Tile& tile, int kv_blocks) {
    k = p.k_int8 + tile.kv_batch_head * kv_blocks * Config::kKTileBytes;
    const int row = threadIdx.x / kVChunks;
    v = row_pointer<Config::Element>(p.v, tile.batch, tile.kv_head, row) + threadIdx.x % kVChunks * 8;
    v_offset = Config::kKTileBytes + swizzled<Config::kVRowBytes>(row, threadIdx.x % kVChunks);
  }

  // Starts the copies of `block`, the one after the last call's.
  __device__ __forceinline__ void next(const Config::Params& p, int block, uint32_t stage) {
#pragma unroll
    for (int i = 0; i < Config::kKTileBytes / 16 / Config::kThreads; ++i) {
      const int offset = (i * Config::kThreads + threadIdx.x) * 16;
      ptx::cp_async_16(stage + offset, k + offset, true);
    }
    // Keys and channels past the end must read as zero: their P is 0, and 0 * NaN would not be.
    const int channel = threadIdx.x % kVChunks * 8;
    const int keys_left = p.kv_len - block * Config::kBlockN - threadIdx.x / kVChunks;
    if (p.v.aligned16) {
      const int rows = channel < p.head_dim ? keys_left : 0;
#pragma unroll
      for (int i = 0; i < Config::kBlockN / kVRowStep; ++i) {
        const bool valid = i * kVRowStep < rows;
        ptx::cp_async_16(stage + v_offset + i * kVRowStep * Config::kVRowBytes,
                         valid ? v + i * kVRowStep * p.v.token_stride : p.v.data, valid);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < Config::kBlockN / kVRowStep; ++i) {
        const auto* source = reinterpret_cast<const uint16_t*>(v + i * kVRowStep * p.v.token_stride);
        const int channels = i * kVRowStep < keys_left ? p.head_dim - channel : 0;
        uint32_t bits[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          bits[j] = (2 * j < channels ? source[2 * j] : 0u) | (2 * j + 1 < channels ? source[2 * j + 1] << 16 : 0u);
        }
        ptx::store_shared_16(stage + v_offset + i * kVRowStep * Config::kVRowBytes, bits);
      }
    }
    k += Config::kKTileBytes;
    v += Config::kBlockN * p.v.token_stride;
  }
};

// Scores of a chunk of keys for the warp's 32 rows, as floats kMagic + score in the accumulators' bits.
__device__ __forceinline__ void compute_scores(const uint32_t (&q)[Config::kMTiles][Config::kQkSteps][4],
                                               uint32_t k_lane,
                                               int32_t (&scores)[Config::kMTiles][Config::kNTiles][4]) {
#pragma unroll
  for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
    for (int n = 0; n < Config::kNTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[m][n][i] = Config::kMagicBits;
    }
  }
#pragma unroll
  for (int step = 0; step < Config::kQkSteps; ++step) {
#pragma unroll
    for (int pair = 0; pair < Config::kNTiles / 2; ++pair) {
      uint32_t k[4];
      ptx::ldmatrix_x4(k, (k_lane + pair * 16 * Config::kKRowBytes) ^ (step * 32));
#pragma unroll
      for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          ptx::mma_m16n8k32_s8(scores[m][pair * 2 + half], q[m][step], k[half * 2], k[half * 2 + 1]);
        }
      }
    }
  }
}

// -infinity for keys past kv_len and, if causal, past the row.
__device__ __forceinline__ void mask_scores(const Config::Params& p, int first_key,
                                            int32_t (&scores)[Config::kMTiles][Config::kNTiles][4]) {
  const Tile tile(p);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
    for (int n = 0; n < Config::kNTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first_key + n * 8 + lane % 4 * 2 + i % 2;
        const int token = tile.warp_row + m * 16 + i / 2 * 8 + lane / 4;
        if (key >= p.kv_len || (p.causal && key > token)) scores[m][n][i] = 0xff800000;
      }
    }
  }
}

// Turns scores into P's A fragments, keeping the running maximum and sum.
__device__ __forceinline__ void softmax(const float (&q_scale)[Config::kRows], float k_scale,
                                        const int32_t (&scores)[Config::kMTiles][Config::kNTiles][4], State& state,
                                        uint32_t (&probabilities)[Config::kMTiles][Config::kPvSteps][4]) {
  float candidate[Config::kRows];
  bool exceeded = false;
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
    float largest = __int_as_float(scores[row / 2][0][row % 2 * 2]);
#pragma unroll
    for (int n = 0; n < Config::kNTiles; ++n) {
      largest = fmaxf(largest, __int_as_float(scores[row / 2][n][row % 2 * 2]));
      largest = fmaxf(largest, __int_as_float(scores[row / 2][n][row % 2 * 2 + 1]));
    }
    candidate[row] = (largest - Config::kMagic) * (q_scale[row] * k_scale);
    exceeded |= candidate[row] > state.row_max[row] + Config::kRescaleThreshold;
  }
  if (__any_sync(0xffffffffu, exceeded)) {
#pragma unroll
    for (int row = 0; row < Config::kRows; ++row) {
      float largest = candidate[row];
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const bool grown = largest > state.row_max[row] + Config::kRescaleThreshold;
      const float factor = grown ? ptx::ex2(state.row_max[row] - largest) : 1.0f;
      if (grown) state.row_max[row] = largest;
      state.row_sum[row] *= factor;
#pragma unroll
      for (int d = 0; d < Config::kOTiles; ++d) {
        state.out[row / 2][d][row % 2 * 2] *= factor;
        state.out[row / 2][d][row % 2 * 2 + 1] *= factor;
      }
    }
  }
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
    const float scale = q_scale[row] * k_scale;
    const float offset = -Config::kMagic * scale - state.row_max[row];
#pragma unroll
    for (int n = 0; n < Config::kNTiles; ++n) {
      const float low = ptx::ex2(__int_as_float(scores[row / 2][n][row % 2 * 2]) * scale + offset);
      const float high = ptx::ex2(__int_as_float(scores[row / 2][n][row % 2 * 2 + 1]) * scale + offset);
      state.row_sum[row] += low + high;
      // The C fragment of two 8-key tiles is the A fragment of a 16-key step.
      probabilities[row / 2][n / 2][row % 2 + n % 2 * 2] = Pair<Config::Element>::pack(low, high);
    }
  }
}

__device__ __forceinline__ void accumulate_pv(const uint32_t (&probabilities)[Config::kMTiles][Config::kPvSteps][4],
                                              uint32_t v_lane, State& state) {
#pragma unroll
  for (int step = 0; step < Config::kPvSteps; ++step) {
#pragma unroll
    for (int pair = 0; pair < Config::kOTiles / 2; ++pair) {
      uint32_t v[4];
      ptx::ldmatrix_x4_trans(v, (v_lane + step * 16 * Config::kVRowBytes) ^ (pair * 32));
#pragma unroll
      for (int m = 0; m < Config::kMTiles; ++m) {
        ptx::mma_m16n8k16_f32<Config::Element>(state.out[m][pair * 2], probabilities[m][step], v[0], v[1]);
        ptx::mma_m16n8k16_f32<Config::Element>(state.out[m][pair * 2 + 1], probabilities[m][step], v[2], v[3]);
      }
    }
  }
}

__device__ __forceinline__ void store_out(const Config::Params& p, State& state) {
  const Tile tile(p);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
    float sum = state.row_sum[row];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const float inverse = 1.0f / sum;
    const int token = tile.warp_row + row * 8 + lane / 4;
    if (token >= p.qo_len) continue;

    auto* out = reinterpret_cast<uint16_t*>(p.out.data) + tile.batch * p.out.batch_stride +
                tile.head * p.out.head_stride + token * p.out.token_stride;
#pragma unroll
    for (int d = 0; d < Config::kOTiles; ++d) {
      const int channel = d * 8 + lane % 4 * 2;
      const uint32_t pair = Pair<Config::Element>::pack(state.out[row / 2][d][row % 2 * 2] * inverse,
                                                        state.out[row / 2][d][row % 2 * 2 + 1] * inverse);
      if (p.out.aligned16) {
        if (channel < p.head_dim) *reinterpret_cast<uint32_t*>(out + channel) = pair;
      } else {
        if (channel < p.head_dim) out[channel] = pair;
        if (channel + 1 < p.head_dim) out[channel + 1] = pair >> 16;
      }
    }
    if (p.lse != nullptr && lane % 4 == 0) {
      constexpr float kLn2 = 0.6931471805599453f;
      float* lse = p.lse + tile.batch_head * p.qo_len + token;
      const float shift = p.k_mean != nullptr ? *lse : 0.0f;
      *lse = (state.row_max[row] + ptx::lg2(sum) + shift) * kLn2;
    }
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, 2)
    sm80_qk_int8_pv_f16(const __grid_constant__ Config::Params p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t stages = ptx::shared_address(shared);
  const int lane = threadIdx.x % 32;
  const Tile tile(p);

  uint32_t q[Config::kMTiles][Config::kQkSteps][4];
  float q_scale[Config::kRows];
  // Q is the caller's, but log-sum-exp's shift needs K's mean.
  if (p.lse != nullptr) ptx::grid_dependency_wait();
  load_q(p, tile, q, q_scale);
  ptx::grid_dependency_wait();

  const int kv_blocks = QuantKInt8::blocks(p.kv_len);
  Loader loader(p, tile, kv_blocks);
  const float* k_scale = p.k_scale + tile.kv_batch_head * kv_blocks * QuantKInt8::kScales + lane % 4;
  // Blocks in which every row sees every key, and all blocks in which some row sees some key.
  const int full_blocks = (p.causal ? min(p.kv_len, tile.first_row + 1) : p.kv_len) / Config::kBlockN;
  const int visible_keys = p.causal ? min(p.kv_len, tile.first_row + Config::kBlockM) : p.kv_len;
  const int blocks = (visible_keys + Config::kBlockN - 1) / Config::kBlockN;

  // Where in a stage this lane's ldmatrix rows start: K's matrices are (keys 0-7, 8-15) x (channels 0-15, 16-31), V's,
  // read transposed, (keys 0-15) x (channels 0-7, 8-15).
  const uint32_t k_lane = swizzled<Config::kKRowBytes>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  const uint32_t v_lane = Config::kKTileBytes + swizzled<Config::kVRowBytes>(lane % 16, lane / 16);

  State state;
#pragma unroll
  for (int row = 0; row < Config::kRows; ++row) {
    state.row_max[row] = -INFINITY;
    state.row_sum[row] = 0.0f;
#pragma unroll
    for (int d = 0; d < Config::kOTiles; ++d) {
      state.out[row / 2][d][row % 2 * 2] = 0.0f;
      state.out[row / 2][d][row % 2 * 2 + 1] = 0.0f;
    }
  }

  loader.next(p, 0, stages);
  ptx::cp_async_commit();
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // this stage has arrived for all warps, and all have left the other one
    const float block_k_scale = k_scale[block * QuantKInt8::kScales];
    const uint32_t stage = stages + block % 2 * Config::kStageBytes;
    if (block + 1 < blocks) loader.next(p, block + 1, stages + (block + 1) % 2 * Config::kStageBytes);
    ptx::cp_async_commit();

#pragma unroll 1
    for (int chunk = 0; chunk < Config::kBlockN / Config::kChunkN; ++chunk) {
      int32_t scores[Config::kMTiles][Config::kNTiles][4];
      uint32_t probabilities[Config::kMTiles][Config::kPvSteps][4];
      compute_scores(q, stage + k_lane + chunk * Config::kChunkN * Config::kKRowBytes, scores);
      if (block >= full_blocks) {
        mask_scores(p, block * Config::kBlockN + chunk * Config::kChunkN, scores);
      }
      softmax(q_scale, block_k_scale, scores, state, probabilities);
      accumulate_pv(probabilities, stage + v_lane + chunk * Config::kChunkN * Config::kVRowBytes, state);
    }
  }

  store_out(p, state);
}

}  // namespace sage
