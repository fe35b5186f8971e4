// How the keys of few queries are shared out among warps.
#pragma once

#include <cstdint>

#include "torch/arguments.h"
#include "torch/call.h"

namespace sage {

// How a strip's keys are shared out: among so many warps of so many blocks of threads. But the warps of some blocks have a strip each.
struct SplitKv {
  int32_t warps = 1, parts = 1, whole_blocks = 0;
  bool cluster = false;  // these blocks are one, which adds parts up itself
  bool staged = false;   // K and V come by way of shared memory
};

// What takes least time. Of numbers of parts some will do.
SplitKv split_kv_of(const Call& call, int32_t multiprocessors);

// Rows that share K and V: of a group of heads. Strips of 16 of these, of all groups.
int64_t group_rows(const AttentionShape& shape);
int64_t group_strips(const AttentionShape& shape);

// Warps that run at once.
int64_t warps_at_once(int32_t head_dim, int32_t multiprocessors);

}  // namespace sage
