// The attention kernels that there are: how each is launched, and what it can do. Which one suits a call is decided in Python
// (sageattention/dispatch.py, table.py).
#pragma once

#include <cstdint>

namespace sage {

struct AttentionKernel {
  const char* name;    // as kernels/attention/ spells it
  const char* masked;  // the one that takes masks, where that is another. Hopper's take masks of bool or Q's dtype alone
  const char* packed;  // the one that takes packed sequences; null: none does
  int32_t (*block_m)(int32_t head_dim);  // rows of the output of a tile
  int32_t (*threads)(int32_t head_dim);
  int32_t (*shared_bytes)(int32_t head_dim);
  int32_t since;          // the architecture whose instructions it needs: 89
  bool that_alone;        // they are no other architecture's
  const char* quant_v;    // the kernel that it takes V from; null: V as it is
  int32_t (*v_block_bytes)(int32_t head_dim);  // of a block of 64 keys that that one writes
  int32_t (*v_scale_bytes)(int32_t head_dim);  // of its scales
  bool v_smooths;         // takes V less its mean
  bool fp4;               // K in FP4 and the means of Q beside it; Sm120 parameters
  bool in_16_bits;        // quantises nothing: one launch, by hopper_in_16_bits.h; block_m, threads and shared_bytes are null
  bool wgmma_int8;        // one block a multiprocessor, each takes tile after tile, alone or in clusters of two; Sm90 parameters
};

// Operators are told a kernel by its number, since no text goes through LibTorch's stable ABI of 2.9. Throws ValueError if there is
// none of that number.
const AttentionKernel& attention_kernel(int64_t number);

// Null past the last.
const char* attention_kernel_name(int64_t number);

}  // namespace sage
