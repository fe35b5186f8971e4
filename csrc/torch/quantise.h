// The launches that come before attention's: K and V as its kernel takes them, into a workspace, of the keys that are seen.
#pragma once

#include "kernels/mask/seen_keys.h"
#include "torch/call.h"
#include "torch/plan/tiling.h"
#include "torch/workspace.h"

namespace sage {

void quantise_k(const Call& call, const Workspace& workspace, const SeenKeys::Words& seen, const Tiling& tiling);

void quantise_v(const Call& call, const Workspace& workspace, const SeenKeys::Words& seen);

// What is subtracted from Q and K.
void find_means(const Call& call, const Workspace& workspace, const SeenKeys::Words& seen);

void quantise_kv_fp4(const Call& call, const Workspace& workspace, const SeenKeys::Words& seen);

}  // namespace sage
