// K and V into shared memory.
#pragma once

#include "kernels/attention/mma_sync/config.cuh"
#include "kernels/attention/tile.cuh"
#include "kernels/element.cuh"
#include "kernels/ptx/cp_async.cuh"
#include "kernels/ptx/shared.cuh"
#include "kernels/swizzle.cuh"

namespace sage {

// What a block of threads computes, in shared memory, and where its K and V start.
struct MmaSyncTile : Tile {
  const uint8_t* k;
  const uint8_t* v;
  const float* k_scale;
  const uint8_t* v_scale;

  template <typename Config>
  static __device__ __forceinline__ MmaSyncTile find(const AttentionParams& p, int index) {
    MmaSyncTile tile{Tile(p, Config::kBlockM, index)};
    tile.k = reinterpret_cast<const uint8_t*>(p.k_int8 + tile.kv_block * Config::kKBlockBytes);
    tile.k_scale = p.k_scale + tile.kv_block * QuantKInt8::kScales;
    if constexpr (Config::kScaled) {
      tile.v = p.v_quantised + tile.kv_block * Config::kVBlockBytes;
      tile.v_scale = p.v_scale + tile.kv_block * Config::kVScaleBytes;
    } else {
      tile.v = reinterpret_cast<const uint8_t*>(
          row_pointer<typename Config::Element>(p.v, tile.batch, tile.kv_head, tile.kv_token));
    }
    return tile;
  }
};

// Starts the copies of the block-th of consecutive blocks, 16 bytes a thread at a time.
template <int Bytes, int Threads>
__device__ __forceinline__ void copy_block(uint32_t destination, const void* blocks, int block) {
  const uint32_t offset = threadIdx.x * 16;
  const uint8_t* source = static_cast<const uint8_t*>(blocks) + static_cast<uint32_t>(block) * uint64_t{Bytes} + offset;
#pragma unroll
  for (int i = 0; i < Bytes; i += Threads * 16) {
    if (Bytes % (Threads * 16) == 0 || i + offset < Bytes) ptx::cp_async_16(destination + offset + i, source + i, true);
  }
}

// Starts the copies of a block of 64 keys of V as the caller left it. A thread copies the same vector of 16 bytes of every
// kRowStep-th row; the step is a multiple of the swizzle's period, so one swizzled offset serves them all.
template <typename Config>
__device__ __forceinline__ void load_v(const AttentionParams& p, const MmaSyncTile& tile, int block, uint32_t v_block) {
  constexpr int kVectors = Config::kHeadDim * 2 / 16;
  constexpr int kRowStep = Config::kThreads / kVectors;
  static_assert(kRowStep % 8 == 0);
  const uint32_t key = block * Config::kBlockN + threadIdx.x / kVectors;
  const int channel = threadIdx.x % kVectors * 8;
  const auto stride = static_cast<uint64_t>(p.v.token_stride) * 2;
  const uint8_t* source = tile.v + channel * 2 + key * stride;
  const uint32_t destination = v_block + swizzled<Config::kVRowBytes>(threadIdx.x / kVectors, threadIdx.x % kVectors);
  // Keys and channels past the end must read as zero: their P is 0, and 0 * NaN would not be.
  if (p.v.aligned16) {
    const int rows = channel < p.v_head_dim ? tile.kv_len - static_cast<int>(key) : 0;
#pragma unroll
    for (int i = 0; i < Config::kBlockN / kRowStep; ++i) {
      ptx::cp_async_16(destination + i * kRowStep * Config::kVRowBytes, source, i * kRowStep < rows);
      source += kRowStep * stride;
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < Config::kBlockN / kRowStep; ++i) {
      const auto* row = reinterpret_cast<const uint16_t*>(source + i * kRowStep * stride);
      const int channels = static_cast<int>(key) + i * kRowStep < tile.kv_len ? p.v_head_dim - channel : 0;
      uint32_t bits[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        bits[j] = (2 * j < channels ? row[2 * j] : 0u) | (2 * j + 1 < channels ? row[2 * j + 1] << 16 : 0u);
      }
      ptx::store_shared_16(destination + i * kRowStep * Config::kVRowBytes, bits);
    }
  }
}

// Where K's and V's scales of a stage lie.
template <typename Config>
__device__ __forceinline__ uint32_t k_scales(uint32_t shared, uint32_t stage) {
  return shared + Config::kKScaleOffset + (stage == shared ? 0 : Config::kKScaleBytes);
}
template <typename Config>
__device__ __forceinline__ uint32_t v_scales(uint32_t shared, uint32_t stage) {
  return shared + Config::kVScaleOffset + (stage == shared ? 0 : Config::kVScaleBytes);
}

template <typename Config>
__device__ __forceinline__ uint32_t other_stage(uint32_t stages, uint32_t stage) {
  return 2 * stages + Config::kStageBytes - stage;
}

// Starts the copies of a block of 64 keys of K and V into a stage.
template <typename Config>
__device__ __forceinline__ void load(const AttentionParams& p, const MmaSyncTile& tile, int block, uint32_t shared, uint32_t stage) {
  const uint32_t v_block = stage + Config::kKBlockBytes;
  copy_block<Config::kKBlockBytes, Config::kThreads>(stage, tile.k, block);
  if (threadIdx.x == 0) {
    static_assert(Config::kKScaleBytes == 16);
    ptx::cp_async_16(k_scales<Config>(shared, stage), tile.k_scale + static_cast<uint32_t>(block) * QuantKInt8::kScales, true);
  }
  if constexpr (Config::kScaled) {
    copy_block<Config::kVBlockBytes, Config::kThreads>(v_block, tile.v, block);
    copy_block<Config::kVScaleBytes, Config::kThreads>(v_scales<Config>(shared, stage), tile.v_scale, block);
  } else {
    load_v<Config>(p, tile, block, v_block);
  }
  ptx::cp_async_commit();
}

}  // namespace sage
