// Stores to global memory that are left out by a predicate.
#pragma once

#include "kernels/tensor_view.h"

namespace sage::ptx {

// 16 bytes past L1, where `condition` holds. Of a branch the compiler would make a wall: loads on one side of it wait for stores on the other.
__device__ __forceinline__ void store_words_if(bool condition, void* destination, const uint32_t (&words)[4]) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.global.cg.v4.b32 [%1], {%2, %3, %4, %5};\n}\n" ::"r"(static_cast<int32_t>(condition)),
               "l"(destination), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

}  // namespace sage::ptx
