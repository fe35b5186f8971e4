// The launches that come before attention's: K and V as its kernel takes them, into a workspace.
#pragma once

#include "torch/call.h"
#include "torch/tiling.h"
#include "torch/workspace.h"

namespace sage {

void quantise_k(const Call& call, const Workspace& workspace, const Tiling& tiling);

void quantise_v(const Call& call, const Workspace& workspace);

// What is subtracted from Q and K.
void find_means(const Call& call, const Workspace& workspace);

void quantise_kv_fp4(const Call& call, const Workspace& workspace);

}  // namespace sage
