// How keys are shared out among the blocks of threads that quantise K or V: what host and device agree on.
#pragma once

#include "kernels/mask/seen_keys.h"

namespace sage {

struct KvSpans {
  static constexpr int kSpanN = 128;  // keys of a span: two blocks of 64

  int32_t kv_heads;
  int32_t kv_len;    // of the whole tensor, as kv_heads
  int32_t head_dim;  // of K, or of V
  int32_t sequences;
  int32_t together;             // spans of a block of threads, which all but the first cost it no sample
  int32_t lots;                 // of so many spans, of a head (of all packed sequences)
  const int32_t* cu_seqlens;    // null: not packed
  const int32_t* cu_seqlens_q;  // of packed sequences under a causal mask, which then have as many keys as queries at most; else null
  SeenKeys::Words seen;
};

}  // namespace sage
