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
  bool v_f8;              // takes V from quant_v_f8
  bool half_only;         // takes float16, not bfloat16
  bool v_differs;         // V's head_dim may differ from Q's and K's
  bool masks;
  bool packed;            // takes packed sequences
  bool persistent;        // one block a multiprocessor, each takes tile after tile, alone or in clusters of two; Sm90 parameters
};

// Throws ValueError, naming those there are, if there is none of that name.
const AttentionKernel& attention_kernel(c10::string_view name);

}  // namespace sage
