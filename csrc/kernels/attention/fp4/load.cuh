// K and V in FP4 into shared memory.
#pragma once

#include "kernels/attention/fp4/config.cuh"
#include "kernels/attention/mma_sync/load.cuh"
#include "kernels/mask/seen_keys.cuh"

namespace sage {

// What a block of threads computes, in shared memory, and where what it reads starts.
struct Fp4Tile : Tile {
  const uint8_t* k;
  const uint8_t* v;
  const uint8_t* v_scale;
  const float* mean_scores;
  int64_t q_mean;  // index of its rows' mean
  int apart;       // key that is set apart: the first that some query of the batch element or sequence sees

  static __device__ __forceinline__ Fp4Tile find(const Config::Params& p, int index) {
    Fp4Tile tile{Tile(p, Config::kBlockM, index)};
    tile.k = p.k_fp4 + tile.kv_block * Fp4::k_block(Config::kHeadDim);
    tile.v = p.v_quantised + tile.kv_block * Fp4::v_block(Config::kHeadDim);
    tile.v_scale = p.v_scale + tile.kv_block * Config::kVScaleBytes;
    const int64_t sequence = tile.kv_mean / p.kv_heads;
    tile.q_mean = (sequence * p.q_heads + tile.head) * p.means + (p.means == 1 ? 0 : tile.first_row / Config::kBlockM);
    if (p.cu_seqlens_q == nullptr) {
      tile.mean_scores = p.mean_scores + tile.q_mean * QuantKInt8::blocks(p.kv_len) * Config::kBlockN;
    } else {
      // A head of Q has as many slots for blocks as a head of K, from which tile.kv_block counts.
      const int64_t head_blocks = slots(p.kv_len, p.batch, QuantKInt8::kSpanN) * (QuantKInt8::kSpanN / QuantKInt8::kBlockN);
      tile.mean_scores = p.mean_scores + (tile.kv_block + (tile.head - tile.kv_head) * head_blocks) * Config::kBlockN;
    }
    tile.apart = SeenByQueries(p.seen, tile.batch).first(p.kv_len);
    return tile;
  }
};

// Starts the copies of a block of 64 keys into a stage.
__device__ __forceinline__ void load_fp4(const Fp4Tile& tile, int block, uint32_t stage) {
  constexpr int kKBytes = Fp4::k_block(Config::kHeadDim), kVBytes = Fp4::v_block(Config::kHeadDim), kThreads = Config::kThreads;
  const auto number = static_cast<uint64_t>(static_cast<uint32_t>(block));
  const uint8_t* k = tile.k + number * kKBytes;
  const uint8_t* v = tile.v + number * kVBytes;
  copy_block<Config::kCodeBytes, kThreads>(stage, k, 0);
  copy_block<kKBytes - Config::kCodeBytes, kThreads>(stage + Config::kKScaleOffset, k + Config::kCodeBytes, 0);
  copy_block<Config::kCodeBytes, kThreads>(stage + Config::kVOffset, v, 0);
  copy_block<kVBytes - Config::kCodeBytes, kThreads>(stage + Config::kVGroupScaleOffset, v + Config::kCodeBytes, 0);
  copy_block<Config::kVScaleBytes, kThreads>(stage + Config::kVScaleOffset, tile.v_scale, block);
  copy_block<Config::kMeanScoreBytes, kThreads>(stage + Config::kMeanScoreOffset, tile.mean_scores, block);
  ptx::cp_async_commit();
}

}  // namespace sage
