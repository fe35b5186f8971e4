// Microbenchmark: the inner loop of Hopper's attention alone, with P V in bfloat16 as in sm90_qk_int8_pv_f16, and in 8-bit integers.
//
// Both compute softmax(Q K^T) V of inputs that the host has quantised and laid out as shared memory has them. The frame is the same:
// pairs of blocks that share K and V by multicast, a ring of stages of 128 keys, warpgroups of 64 rows. A stage's record holds K and,
// as many keys behind as a step takes, V: what one step multiplies.
//
// Integers. Probabilities of a tile of keys are bytes, 255 at the row's maximum in that tile. V's bytes are 128 more than its
// integers, so that no product is negative and a sum of 128 products stays below 2^23: read as a float, the sum is a subnormal number
// of the same worth, 2^-149 times it. One multiply-add, with a factor 2^149 too large for as long as the unit of the output allows,
// takes it into the output; no conversion does. In the end 128 comes off again, the same for all rows.
#include "kernels/attention/wgmma/softmax.cuh"
#include "kernels/ptx/cluster.cuh"
#include "kernels/ptx/cp_async.cuh"
#include "kernels/ptx/mbarrier.cuh"
#include "kernels/ptx/wgmma.cuh"
#include "kernels/swizzle.cuh"

namespace sage::int8_pv {

constexpr int kHeadDim = 128;
constexpr int kStageKeys = 128;
constexpr int kKBytes = kStageKeys * kHeadDim;
constexpr int kScaleBytes = kStageKeys / 64 * 8 * 4;  // for each 64 keys four scales, then four bounds

struct Params {
  const uint8_t* q;       // INT8 [head, token, channel]
  const float* q_scale;   // [head, token], in log2 units
  const float* q_bound;   // the scale times the row's norm
  const uint8_t* stages;  // [head, stage] records
  const float* v_scale;   // [head, channel]; integers only
  __nv_bfloat16* out;     // [head, token, channel]
  int32_t tokens;         // a multiple of 128
  int32_t tiles_of_head;  // of the output, each a pair of blocks' rows
  int32_t tiles;
};

// What a loop is compiled for.
struct Bf16 {
  static constexpr bool kIntegers = false;
  static constexpr int kConsumers = 3;  // warpgroups that compute
  static constexpr int kTileKeys = 64;  // of a step
  static constexpr int kStages = 3;
  static constexpr bool kKeepQ = true;  // in registers
  // P V is waited for behind the exponentials, where it stands in the source. Left to itself the compiler waits before most of them.
  static constexpr bool kWaitLate = false;
};
struct Bf16WaitLate : Bf16 {
  static constexpr bool kWaitLate = true;
};
// Two warpgroups have the registers for integers of all channels beside the output.
struct Integers {
  static constexpr bool kIntegers = true;
  static constexpr int kConsumers = 2;
  static constexpr int kTileKeys = 128;
  static constexpr int kStages = 5;
  static constexpr bool kKeepQ = false;
  static constexpr bool kWaitLate = true;
  // Probabilities become bytes while Q K^T of the next tile runs, rather than before it starts.
  static constexpr bool kPackBeside = true;
  static constexpr int kParts = 1;  // the channels whose integers are summed at a time: of so many parts
};
struct IntegersPackFirst : Integers {
  static constexpr bool kPackBeside = false;
};
struct IntegersWaitEarly : IntegersPackFirst {
  static constexpr bool kWaitLate = false;
};
// Half of the channels after the other.
struct IntegersHalves : Integers {
  static constexpr bool kKeepQ = true;
  static constexpr int kParts = 2;
};
// … which with tiles of 64 keys leaves room for a third warpgroup.
struct IntegersThree : Integers {
  static constexpr int kConsumers = 3;
  static constexpr int kTileKeys = 64;
  static constexpr int kParts = 2;
};

// Sizes and offsets in shared memory.
template <typename Loop>
struct Layout {
  static constexpr int kThreads = 128 * (1 + Loop::kConsumers);
  static constexpr int kBlockM = 64 * Loop::kConsumers;
  static constexpr int kStageTiles = kStageKeys / Loop::kTileKeys;
  static constexpr int kVBytes = kStageKeys * kHeadDim * (Loop::kIntegers ? 1 : 2);
  static constexpr int kRecordBytes = kKBytes + kVBytes + kScaleBytes;
  static constexpr int kSlotBytes = (kRecordBytes + 1023) / 1024 * 1024;
  static constexpr int kQ = Loop::kStages * kSlotBytes;
  static constexpr int kQBytes = Loop::kKeepQ ? 0 : kBlockM * kHeadDim;
  static constexpr int kFull = kQ + kQBytes;
  static constexpr int kEmpty = kFull + Loop::kStages * 8;
  static constexpr int kTotal = kEmpty + Loop::kStages * 8;
  static_assert(kTotal + 1024 <= 232448);
  static constexpr int kProducerRegisters = Loop::kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = Loop::kConsumers == 3 ? 160 : 232;
};

// Tiles of the output that a pair of blocks computes: neighbouring rows, heads one after the other.
template <typename Loop>
struct Tiles {
  const Params& p;
  int index = ptx::cluster_index();
  __device__ __forceinline__ explicit Tiles(const Params& params) : p(params) {}
  __device__ __forceinline__ bool more() const { return index < p.tiles; }
  __device__ __forceinline__ void next() { index += gridDim.x / 2; }
  __device__ __forceinline__ int head() const { return index / p.tiles_of_head; }
  __device__ __forceinline__ int first_row() const {
    return (index % p.tiles_of_head * 2 + ptx::cluster_rank()) * Layout<Loop>::kBlockM;
  }
};

__device__ __forceinline__ int stages_of(const Params& p) { return p.tokens / kStageKeys + 1; }

// Streams records into the ring. One thread; each block of the pair fetches a half for both.
template <typename Loop>
__device__ __forceinline__ void load(const Params& p, uint32_t shared) {
  using L = Layout<Loop>;
  constexpr int kHalf = L::kRecordBytes / 2;
  static_assert(kHalf % 16 == 0);
  const int offset = ptx::cluster_rank() * kHalf;
  int stage = 0;
  uint32_t parity = 0;
  for (Tiles<Loop> tiles(p); tiles.more(); tiles.next()) {
    const uint8_t* record = p.stages + static_cast<int64_t>(tiles.head()) * stages_of(p) * L::kRecordBytes + offset;
    for (int i = 0; i < stages_of(p); ++i, record += L::kRecordBytes) {
      const uint32_t full = shared + L::kFull + stage * 8;
      ptx::mbarrier_wait(shared + L::kEmpty + stage * 8, parity ^ 1);
      ptx::mbarrier_arrive_expect(full, L::kRecordBytes);
      ptx::bulk_copy_to(3, shared + stage * L::kSlotBytes + offset, record, kHalf, full);
      if (++stage == Loop::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
}

// A warp's place in the ring: descriptors of the stage's K and V, and barriers.
template <typename Loop>
struct Stage {
  using L = Layout<Loop>;
  uint32_t shared;
  ptx::Descriptor k, v;
  uint32_t empty;  // in the block that this lane tells
  bool releases;
  int stage = 0;
  uint32_t parity = 0, ready = 0;

  __device__ __forceinline__ explicit Stage(uint32_t address) : shared(address) {
    k = ptx::wgmma_descriptor<128>(shared);
    if constexpr (Loop::kIntegers) v = ptx::wgmma_descriptor<128>(shared + kKBytes);
    else v = ptx::wgmma_descriptor_rows_along_n<64 * 128>(shared + kKBytes);
    const int lane = threadIdx.x % 32;
    releases = lane < 2;
    empty = ptx::cluster_address(shared + L::kEmpty, releases ? lane : 0);
  }
  __device__ __forceinline__ void wait_full() {
    ptx::mbarrier_wait_unless(ready, shared + L::kFull + stage * 8, parity);
    ready = 0;
  }
  // Whether the next stage is full: asked early, the answer costs no time.
  __device__ __forceinline__ void ask_for_next() {
    const bool last = stage == Loop::kStages - 1;
    ready = ptx::mbarrier_test(shared + L::kFull + (last ? 0 : stage + 1) * 8, last ? parity ^ 1 : parity);
  }
  __device__ __forceinline__ void leave() {
    __syncwarp();
    if (releases) ptx::mbarrier_arrive_at(empty + stage * 8);
    ++stage;
    k.low += L::kSlotBytes / 16;
    v.low += L::kSlotBytes / 16;
    if (stage == Loop::kStages) {
      stage = 0;
      parity ^= 1;
      k.low -= Loop::kStages * L::kSlotBytes / 16;
      v.low -= Loop::kStages * L::kSlotBytes / 16;
    }
  }
  // Of the stage's 64 keys of this index, those that the lane has.
  __device__ __forceinline__ float k_scale(int index) const {
    return ptx::load_shared_float(shared + stage * L::kSlotBytes + kKBytes + L::kVBytes + index * 32 + threadIdx.x % 4 * 4);
  }
  __device__ __forceinline__ float k_bound(int index) const {
    return ptx::load_shared_float(shared + stage * L::kSlotBytes + kKBytes + L::kVBytes + index * 32 + 16 + threadIdx.x % 4 * 4);
  }
};

// The rows of a lane: the first of its two, the other being 8 further.
__device__ __forceinline__ int64_t row_of(const Params& p, int head, int first_row) {
  return static_cast<int64_t>(head) * p.tokens + first_row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
}

__device__ __forceinline__ void load_queries(const Params& p, int64_t row, Queries& q) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint8_t* source = p.q + (row + i % 2 * 8) * kHeadDim + step * 32 + i / 2 * 16 + threadIdx.x % 4 * 4;
      q[step][i] = __ldg(reinterpret_cast<const uint32_t*>(source));
    }
  }
}

// Puts this warp's rows where wgmma finds them in shared memory.
__device__ __forceinline__ void store_queries(const Queries& q, uint8_t* destination) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = threadIdx.x % 128 / 32 * 16 + lane / 4 + i % 2 * 8;
      *reinterpret_cast<uint32_t*>(destination + swizzled<128>(row, step * 2 + i / 2) + lane % 4 * 4) = q[step][i];
    }
  }
}

// out * inverse[row] - origin, times a scale for each channel.
template <bool Scaled>
__device__ __forceinline__ void store_out(const Params& p, int head, int64_t row, const float (&inverse)[2], float origin,
                                          const Output& out) {
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; i += 2) {
    const int channel = i / 4 * 8 + threadIdx.x % 4 * 2;
    const int of_two = i / 2 % 2;
    float2 x = {out[i] * inverse[of_two] - origin, out[i + 1] * inverse[of_two] - origin};
    if constexpr (Scaled) {
      const float2 scale = __ldg(reinterpret_cast<const float2*>(p.v_scale + head * kHeadDim + channel));
      x = {x.x * scale.x, x.y * scale.y};
    }
    *reinterpret_cast<__nv_bfloat162*>(p.out + (row + of_two * 8) * kHeadDim + channel) = __floats2bfloat162_rn(x.x, x.y);
  }
}

// Nothing, but what follows in the source follows in the machine code: the compiler moves no waits over a branch.
__device__ __forceinline__ void stay_behind(float probability) {
  if (__any_sync(0xffffffffu, __float_as_uint(probability) == 0xffffffffu)) __trap();
}

// The present loop: attend.cuh's, where no mask hides anything and no tile's scores may exceed the headroom.
template <typename Loop>
__device__ __forceinline__ void consume_bf16(const Params& p, uint32_t shared) {
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0) - 1;
  Stage<Loop> stage(shared);
  Queries q;
  Scores scores;
  Probabilities probabilities;
  Output out;
  Rows rows;
  const auto start_qk = [&](int index) {
    ptx::wgmma_hold(scores);
    ptx::wgmma_hold(out);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) ptx::wgmma_s8_s8(scores, q[step], stage.k + index * (64 * 128 / 16) + step * 2, step > 0);
    ptx::wgmma_commit();
  };
  const auto start_pv = [&](int index) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      ptx::wgmma_f32<__nv_bfloat16>(out, probabilities[step], stage.v + index * (64 * 256 / 16) + step * (16 * 128 / 16));
    }
    ptx::wgmma_commit();
    add_to_sums(probabilities, rows);
  };
  const auto finish_pv = [&] {
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(out);
  };
  const auto step = [&](int index) {
    start_qk(index);
    start_pv(index);
    const float k_scale = stage.k_scale(index), k_bound = stage.k_bound(index);
    const bool bounded = __all_sync(0xffffffffu, k_bound <= rows.k_limit);
    ptx::wgmma_wait<1>();
    if (index == 1) stage.ask_for_next();
    ptx::wgmma_hold(scores);
    if (!bounded) __trap();
    make_probabilities<false>(scores, k_scale, rows);
    if constexpr (Loop::kWaitLate) stay_behind(__int_as_float(scores[31]));
    finish_pv();
  };
  for (Tiles<Loop> tiles(p); tiles.more(); tiles.next()) {
    const int first_row = tiles.first_row() + group * 64;
    if (first_row >= p.tokens) {
      for (int i = 0; i < stages_of(p); ++i) {
        stage.wait_full();
        stage.leave();
      }
      continue;
    }
    const int64_t row = row_of(p, tiles.head(), first_row);
    load_queries(p, row, q);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows.q_scale[i] = __ldg(p.q_scale + row + i * 8);
      rows.reference[i] = -INFINITY;
      rows.sum[i] = 0.0f;
    }
    rows.k_limit = -INFINITY;
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) out[i] = 0.0f;
    stage.wait_full();
    start_qk(0);
    const float first_k_scale = stage.k_scale(0);
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(scores);
    float largest[2];
    find_largest(scores, first_k_scale, rows, largest);
    raise_references(largest, p.q_bound + row, rows, out, finish_pv);
    make_probabilities<false>(scores, first_k_scale, rows);
    pack(scores, probabilities);
#pragma unroll 1
    for (int left = stages_of(p) - 1; left > 0; --left) {
      step(1);
      stage.leave();
      pack(scores, probabilities);
      stage.wait_full();
      if (left == 1) break;
      step(0);
      pack(scores, probabilities);
    }
    ptx::wgmma_hold(out);
    ptx::wgmma_fence();
    start_pv(0);
    finish_pv();
    stage.leave();
    const float inverse[2] = {1.0f / sum_of_quad(rows.sum[0]), 1.0f / sum_of_quad(rows.sum[1])};
    store_out<false>(p, tiles.head(), row, inverse, 0.0f, out);
  }
}

// Of integers, what a lane keeps of its two rows.
struct IntegerRows {
  static constexpr float kHeadroom = 40.0f;
  // What 2^149 is short of, so that factors up to the headroom are numbers.
  static constexpr float kUnit = 127.0f - kHeadroom;
  static constexpr float kLevel = 7.994353436858858f;  // log2(255)
  float q_scale[2];
  float reference[2];  // of the output, in log2 units; a tile's maximum may exceed it by kHeadroom
  float largest[2];    // of the tile
  float factor[2];     // from the tile's integers to the output
  float sum[2];        // this lane's keys only, in the output's unit
};

template <typename Loop>
__device__ __forceinline__ void consume_integers(const Params& p, uint32_t shared, uint8_t* shared_pointer) {
  using L = Layout<Loop>;
  constexpr int kScores = Loop::kTileKeys / 2;
  constexpr int kChunks = Loop::kTileKeys / 16;  // of 8 scores, which are two registers of a fragment
  constexpr int kProducts = kHeadDim / 2 / Loop::kParts;
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0) - 1;
  const ptx::Descriptor q_descriptor = ptx::wgmma_descriptor<128>(shared + L::kQ + group * 64 * kHeadDim);
  Stage<Loop> stage(shared);
  Queries q;
  int32_t scores[kScores];
  uint32_t probabilities[Loop::kTileKeys / 32][4];
  int32_t products[kProducts];
  Output out;
  IntegerRows rows;

  const auto start_qk = [&](int index) {
    ptx::wgmma_hold(scores);
    ptx::wgmma_hold(products);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const ptx::Descriptor k = stage.k + index * (Loop::kTileKeys * 128 / 16) + step * 2;
      if constexpr (Loop::kKeepQ) ptx::wgmma_s8_s8(scores, q[step], k, step > 0);
      else ptx::wgmma_s8_s8(scores, q_descriptor + step * 2, k, step > 0);
    }
    ptx::wgmma_commit();
  };
  const auto start_pv = [&](int index, int part) {
#pragma unroll
    for (int step = 0; step < Loop::kTileKeys / 32; ++step) {
      const ptx::Descriptor v = stage.v + part * (64 * 128 / 16) + index * (Loop::kTileKeys / 16) + step * 2;
      ptx::wgmma_u8_u8(products, probabilities[step], v, step > 0);
    }
    ptx::wgmma_commit();
  };
  const auto finish_pv = [&] {
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(products);
  };
  // Adds the part's integers to the output: the `slice`th of `slices`.
  const auto flush = [&](int part, const float (&factor)[2], int slice, int slices) {
    const int count = kProducts / slices;
#pragma unroll
    for (int i = slice * count; i < (slice + 1) * count; ++i) {
      float& sum = out[part * kProducts + i];
      sum = __fmaf_rn(__int_as_float(products[i]), factor[i / 2 % 2], sum);
    }
  };
  // The rows' maxima in the tile, and the factor of its integers. `before` is that of those not yet flushed.
  const auto find_largest = [&](const float (&k_scale)[Loop::kTileKeys / 64], float (&before)[2]) {
    bool exceeded = false;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      rows.largest[row] = -INFINITY;
#pragma unroll
      for (int block = 0; block < Loop::kTileKeys / 64; ++block) {
        int32_t largest = scores[block * 32 + row * 2];
#pragma unroll
        for (int i = row * 2; i < 32; i += 4) largest = max(largest, max(scores[block * 32 + i], scores[block * 32 + i + 1]));
        rows.largest[row] = fmaxf(rows.largest[row], static_cast<float>(largest) * (rows.q_scale[row] * k_scale[block]));
      }
      rows.largest[row] = max_of_quad(rows.largest[row]);
      exceeded |= rows.largest[row] > rows.reference[row] + IntegerRows::kHeadroom;
    }
    if (__any_sync(0xffffffffu, exceeded)) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float reference = fmaxf(rows.reference[row], rows.largest[row]);
        const float factor = ptx::ex2(rows.reference[row] - reference);
        rows.reference[row] = reference;
        rows.sum[row] *= factor;
        before[row] *= factor;
#pragma unroll
        for (int i = row * 2; i < kHeadDim / 2; i += 4) {
          out[i] *= factor;
          out[i + 1] *= factor;
        }
      }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      rows.factor[row] = ptx::ex2(rows.largest[row] - rows.reference[row] + IntegerRows::kUnit);
    }
  };
  // A tile's probabilities as pairs of float16 from 1024 to 1279: their low bytes are what is wanted. `beside` is done before each chunk.
  // Chunks depend on those before, lest the compiler put all exponentials at the end (make_probabilities).
  uint32_t pairs[kScores / 2];
  const auto exponentials = [&](const float (&k_scale)[Loop::kTileKeys / 64], const auto& beside) {
    float reference[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) reference[row] = rows.largest[row] - IntegerRows::kLevel;
    float scale[2], last[2] = {0.0f, 0.0f}, newest = 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      beside(chunk, newest);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        if (chunk % 4 == 0) scale[row] = rows.q_scale[row] * k_scale[chunk / 4];
        if (chunk >= 2 && chunk % 2 == 0) reference[row] = __fmaf_rn(last[row], 0.0f, reference[row]);
      }
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const int row = i / 2 % 2;
        float x[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) x[j] = ptx::ex2(__fmaf_rn(static_cast<float>(scores[chunk * 8 + i + j]), scale[row], -reference[row]));
        // What the chunk after the next waits for.
        if (chunk % 2 == 0) last[row] = x[1];
        newest = x[1];
        pairs[chunk * 4 + i / 2] = Pair<__half>::add(Pair<__half>::pack(x[0], x[1]), 0x64006400u);
      }
    }
  };
  // Bytes, in the order that V's keys have; their sums.
  const auto pack = [&] {
    uint32_t sum[2] = {0, 0};
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        uint32_t& bytes = probabilities[chunk / 2][chunk % 2 * 2 + row];
        bytes = __byte_perm(pairs[chunk * 4 + row], pairs[chunk * 4 + row + 2], 0x6420);
        sum[row] = __dp4a(bytes, 0x01010101u, sum[row]);
      }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) rows.sum[row] = __fmaf_rn(__uint_as_float(sum[row]), rows.factor[row], rows.sum[row]);
  };
  // The scores of a tile and the integers of the one before.
  const auto step = [&](int index) {
    if constexpr (!Loop::kPackBeside) pack();
    start_qk(index);
    if constexpr (Loop::kPackBeside) {
      pack();
      ptx::wgmma_fence();
    }
    start_pv(index, 0);
    float k_scale[Loop::kTileKeys / 64];
#pragma unroll
    for (int i = 0; i < Loop::kTileKeys / 64; ++i) k_scale[i] = stage.k_scale(index + i);
    float before[2] = {rows.factor[0], rows.factor[1]};
    ptx::wgmma_wait<1>();
    if (index == L::kStageTiles - 1) stage.ask_for_next();
    ptx::wgmma_hold(scores);
    find_largest(k_scale, before);
    if constexpr (Loop::kParts == 2) {
      finish_pv();
      flush(0, before, 0, 1);
      ptx::wgmma_hold(products);
      ptx::wgmma_fence();
      start_pv(index, 1);
    }
    exponentials(k_scale, [&](int chunk, float newest) {
      if (chunk < kChunks / 2) return;
      if (chunk == kChunks / 2) {
        if constexpr (Loop::kWaitLate) stay_behind(newest);
        finish_pv();
      }
      flush(Loop::kParts - 1, before, chunk - kChunks / 2, kChunks / 2);
    });
  };

  for (Tiles<Loop> tiles(p); tiles.more(); tiles.next()) {
    const int first_row = tiles.first_row() + group * 64;
    if (first_row >= p.tokens) {
      for (int i = 0; i < stages_of(p); ++i) {
        stage.wait_full();
        stage.leave();
      }
      continue;
    }
    const int64_t row = row_of(p, tiles.head(), first_row);
    load_queries(p, row, q);
    if constexpr (!Loop::kKeepQ) {
      ptx::named_barrier(1 + group, 128);  // until the group's other warps have done with the tile before
      store_queries(q, shared_pointer + L::kQ + group * 64 * kHeadDim);
      ptx::proxy_async_fence();
      ptx::named_barrier(1 + group, 128);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows.q_scale[i] = __ldg(p.q_scale + row + i * 8);
      rows.reference[i] = -INFINITY;
      rows.sum[i] = 0.0f;
      rows.factor[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) out[i] = 0.0f;
    stage.wait_full();
    start_qk(0);
    {
      float k_scale[Loop::kTileKeys / 64], before[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < Loop::kTileKeys / 64; ++i) k_scale[i] = stage.k_scale(i);
      ptx::wgmma_wait<0>();
      ptx::wgmma_hold(scores);
      find_largest(k_scale, before);
      exponentials(k_scale, [](int, float) {});
    }
#pragma unroll 1
    for (int left = stages_of(p) - 1; left > 0; --left) {
      if constexpr (L::kStageTiles == 2) step(1);
      stage.leave();
      stage.wait_full();
      if (left == 1) break;
      step(0);
    }
    pack();
#pragma unroll
    for (int part = 0; part < Loop::kParts; ++part) {
      ptx::wgmma_hold(products);
      ptx::wgmma_fence();
      start_pv(0, part);
      finish_pv();
      flush(part, rows.factor, 0, 1);
    }
    stage.leave();
    const float inverse[2] = {1.0f / sum_of_quad(rows.sum[0]), 1.0f / sum_of_quad(rows.sum[1])};
    store_out<true>(p, tiles.head(), row, inverse, 128.0f, out);
  }
}

template <typename Loop>
__device__ __forceinline__ void attend(const Params& p) {
  using L = Layout<Loop>;
  uint8_t* unaligned = ptx::dynamic_shared();
  uint8_t* pointer = unaligned + (1024 - ptx::shared_address(unaligned) % 1024) % 1024;
  const uint32_t shared = ptx::shared_address(pointer);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Loop::kStages; ++stage) {
      ptx::mbarrier_init(shared + L::kFull + stage * 8, 1);
      ptx::mbarrier_init(shared + L::kEmpty + stage * 8, 2 * 4 * Loop::kConsumers);
    }
    ptx::mbarrier_init_fence();
  }
  ptx::cluster_sync_relaxed();
  if (threadIdx.x < 128) {
    ptx::registers_release<L::kProducerRegisters>();
    if (threadIdx.x == 0) load<Loop>(p, shared);
  } else {
    ptx::registers_acquire<L::kConsumerRegisters>();
    if constexpr (Loop::kIntegers) consume_integers<Loop>(p, shared, pointer);
    else consume_bf16<Loop>(p, shared);
  }
  ptx::cluster_sync();
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Layout<Bf16>::kThreads, 1)
    bf16(const __grid_constant__ Params p) {
  attend<Bf16>(p);
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Layout<Bf16WaitLate>::kThreads, 1)
    bf16_wait_late(const __grid_constant__ Params p) {
  attend<Bf16WaitLate>(p);
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Layout<Integers>::kThreads, 1)
    integers(const __grid_constant__ Params p) {
  attend<Integers>(p);
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Layout<IntegersPackFirst>::kThreads, 1)
    integers_pack_first(const __grid_constant__ Params p) {
  attend<IntegersPackFirst>(p);
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Layout<IntegersWaitEarly>::kThreads, 1)
    integers_wait_early(const __grid_constant__ Params p) {
  attend<IntegersWaitEarly>(p);
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Layout<IntegersHalves>::kThreads, 1)
    integers_halves(const __grid_constant__ Params p) {
  attend<IntegersHalves>(p);
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Layout<IntegersThree>::kThreads, 1)
    integers_three(const __grid_constant__ Params p) {
  attend<IntegersThree>(p);
}

}  // namespace sage::int8_pv
