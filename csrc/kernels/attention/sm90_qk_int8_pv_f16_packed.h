// The attention kernel for Hopper of packed sequences: what host and device agree on.
#pragma once

#include "kernels/attention/sm90_qk_int8_pv_f16.h"

namespace sage {

struct Sm90QkInt8PvF16Packed : Sm90QkInt8PvF16 {};

}  // namespace sage
