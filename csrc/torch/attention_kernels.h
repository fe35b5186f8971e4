// The attention kernels that there are: how each is launched, and what it can do. Which one suits a call is decided in Python
// (sageattention/dispatch.py).
#pragma once

#include <c10/util/string_view.h>

#include <cstdint>

namespace sage {

struct AttentionKernel {
  c10::string_view name;  // as kernels/attention/ spells it
  int32_t (*block_m)(int32_t head_dim);  // rows of the output of a tile
  int32_t (*threads)(int32_t head_dim);
  int32_t (*shared_bytes)(int32_t head_dim);
  int32_t largest_head_dim;
  int32_t since;          // the architecture whose instructions it needs: 89
  bool that_alone;        // they are no other architecture's
  const char* quant_v;    // the kernel that it takes V from; null: V as it is
  int32_t v_bytes;        // of a number that that one writes
  int32_t (*v_scale_bytes)(int32_t head_dim);  // that it writes of a block of keys
  bool v_smooths;         // takes V less its mean
  bool v_differs;         // V's head_dim may differ from Q's and K's
  bool masks;             // a persistent one such as are bool or of Q's dtype
  bool packed;            // takes packed sequences
  int32_t few_queries;    // up to which, or up to so many keys, PyTorch's own attention is faster
  int32_t few_keys;
  bool persistent;        // one block a multiprocessor, each takes tile after tile, alone or in clusters of two; Sm90 parameters
};

// Throws ValueError, naming those there are, if there is none of that name.
const AttentionKernel& attention_kernel(c10::string_view name);

}  // namespace sage
