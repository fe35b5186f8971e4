// Numbers in e2m1: what host and device agree on.
#pragma once

#include "kernels/quant/quant_v.h"

namespace sage {

struct Fp4 {
  static constexpr int kGroup = 16;  // numbers that share a scale
  // What a number is at most, in the unit that many groups share: 4 times e4m3's largest.
  static constexpr float kLargest = 4.0f * 448.0f;
  static constexpr float kSmallestScale = 1.0f / 512.0f;  // e4m3's
  // Magnitude from which on units are what they are: the product of two and what is divided by it are numbers.
  static constexpr float kSmallest = 1e-10f;

  // Bytes of a block of 64 keys of K or V: its numbers', and their scales'.
  SAGE_HOST_DEVICE static constexpr int code_bytes(int head_dim) { return QuantKInt8::kBlockN * head_dim / 2; }
  SAGE_HOST_DEVICE static constexpr int group_scale_bytes(int head_dim) { return QuantKInt8::kBlockN * head_dim / kGroup; }
  // K: rows of numbers, swizzled; for each key head_dim / 16 scales; and in 16 bytes their unit, a float.
  SAGE_HOST_DEVICE static constexpr int k_block(int head_dim) { return code_bytes(head_dim) + group_scale_bytes(head_dim) + 16; }
  // V: for each channel 32 bytes of numbers, swizzled; then scales, of a channel and that 8 further beside each other.
  SAGE_HOST_DEVICE static constexpr int v_block(int head_dim) { return code_bytes(head_dim) + group_scale_bytes(head_dim); }
};

}  // namespace sage
