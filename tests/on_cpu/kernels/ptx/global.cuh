// Stores to global memory that are left out by a predicate.
#pragma once

#include "gpu.h"

namespace sage::ptx {

inline void store_words_if(bool condition, void* destination, const uint32_t (&words)[4]) {
  if (condition) __stcg(static_cast<uint4*>(destination), make_uint4(words[0], words[1], words[2], words[3]));
}

}  // namespace sage::ptx
