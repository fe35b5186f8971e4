// How a warp gets K and V of a block of keys: as words of fragments, piece by piece of their channels.
//
//   start_k(words, block)   has K of a block be on its way, once all of the one before has been asked for
//   no_k()                  or there is none
//   start_v(words, block)   the same of V, which there is
//   k(words, piece)         has a piece of K be there: of all, one after the other
//   v(words, piece)
//   finish()                there are no others
#pragma once

#include "kernels/attention/mma_sync_in_16_bits/config.cuh"
#include "kernels/element.cuh"
#include "kernels/ptx/cp_async.cuh"
#include "kernels/ptx/shared.cuh"

namespace sage {

// K or V of a block, [piece][tile][word], of the keys that stand in a lane's rows of fragments.
using Block = uint32_t[Config::kPieces][Config::kTiles][4];

// Which key of a block that is, of a tile.
__device__ __forceinline__ int key_of_lane(int tile) {
  const int column = threadIdx.x % 32 / 4;
  return column / 2 * Config::kRun + tile * 2 + column % 2;
}

// Where they lie.
struct KeysOfHead {
  const Config::Params& p;
  const Config::Element *k, *v;
};

// Straight from memory: ahead of their time where registers are there for them; else so many pieces at once.
class FromMemory {
 public:
  __device__ __forceinline__ explicit FromMemory(const KeysOfHead& head) : head_(head) {}

  __device__ __forceinline__ void start_k(Block& words, int block) {
    k_block_ = block;
    if (Config::kAhead) load(words, head_.p.k, head_.k, block, head_.p.head_dim, 0, Config::kPieces);
  }
  __device__ __forceinline__ void no_k() {}
  __device__ __forceinline__ void start_v(Block& words, int block) {
    v_block_ = block;
    if (Config::kAhead) load(words, head_.p.v, head_.v, block, head_.p.v_head_dim, 0, Config::kPieces);
  }
  __device__ __forceinline__ void k(Block& words, int piece) const {
    if (!Config::kAhead && piece % kTogether == 0) load(words, head_.p.k, head_.k, k_block_, head_.p.head_dim, piece, kTogether);
  }
  __device__ __forceinline__ void v(Block& words, int piece) const {
    if (!Config::kAhead && piece % kTogether == 0) load(words, head_.p.v, head_.v, v_block_, head_.p.v_head_dim, piece, kTogether);
  }
  __device__ __forceinline__ void finish() {}

 private:
  static constexpr int kTogether = 4;

  __device__ __forceinline__ void load(Block& words, const TensorView& tensor, const Config::Element* head, int block, int head_dim, int first,
                                       int count) const {
#pragma unroll
    for (int piece = 0; piece < Config::kPieces; ++piece) {
      if (piece < first || piece >= first + count) continue;
#pragma unroll
      for (int tile = 0; tile < Config::kTiles; ++tile) {
        load_piece(words[piece][tile], tensor, head, block + key_of_lane(tile), head_.p.kv_len, piece, head_dim);
      }
    }
  }

  const KeysOfHead head_;
  int k_block_ = 0, v_block_ = 0;
};

// By way of shared memory: rows are read from end to end, 512 bytes at a time, in which memory is a sixth faster than in the 64 bytes each that fragments
// want of eight rows (bench/notes-short.md).
class Staged {
 public:
  __device__ __forceinline__ Staged(const KeysOfHead& head, uint8_t* memory) : head_(head), memory_(ptx::shared_address(memory)) {}

  __device__ __forceinline__ void start_k(Block&, int block) { start(memory_, head_.p.k, head_.k, block, head_.p.head_dim); }
  __device__ __forceinline__ void no_k() { ptx::cp_async_commit(); }
  __device__ __forceinline__ void start_v(Block&, int block) { start(memory_ + Config::kBlockBytes, head_.p.v, head_.v, block, head_.p.v_head_dim); }
  __device__ __forceinline__ void k(Block& words, int piece) const { load(words, memory_, piece); }
  __device__ __forceinline__ void v(Block& words, int piece) const { load(words, memory_ + Config::kBlockBytes, piece); }
  __device__ __forceinline__ void finish() { ptx::cp_async_wait<0>(); }

 private:
  static constexpr int kRowVectors = SAGE_HEAD_DIM / 8;  // of 16 bytes

  // Of neighbouring rows, which are read at the same time, the halves of 128 bytes change places: other banks. (What kernels/swizzle.cuh does suits
  // eight rows at a time; of two it may leave both in the same half.)
  static __device__ __forceinline__ int offset(int row, int vector) { return (row * kRowVectors + (vector ^ row % 2 * 4)) * 16; }

  __device__ __forceinline__ void start(uint32_t to, const TensorView& tensor, const Config::Element* head, int block, int head_dim) const {
    const int lane = threadIdx.x % 32, vector = lane % kRowVectors;
    __syncwarp();  // all have read what was there
#pragma unroll
    for (int i = 0; i < Config::kBlockN * kRowVectors / 32; ++i) {
      const int row = (i * 32 + lane) / kRowVectors;
      const bool there = block + row < head_.p.kv_len && vector * 8 < head_dim;
      ptx::cp_async_16(to + offset(row, vector), head + (block + row) * tensor.token_stride + vector * 8, there);
    }
    ptx::cp_async_commit();
  }
  // The other of K and V, which was started after it, may be on its way still.
  __device__ __forceinline__ void load(Block& words, uint32_t from, int piece) const {
    if (piece == 0) {
      ptx::cp_async_wait<1>();
      __syncwarp();
    }
#pragma unroll
    for (int tile = 0; tile < Config::kTiles; ++tile) {
      ptx::load_shared_words(words[piece][tile], from + offset(key_of_lane(tile), piece * 4 + threadIdx.x % 4));
    }
  }

  const KeysOfHead head_;
  uint32_t memory_;
};

}  // namespace sage
