// Functions of PyTorch's CUDA library.
#pragma once

#include "runtime/library.h"

namespace sage {

// Found at run time: linking libtorch_cuda would tie this library to PyTorch builds with CUDA. Throws std::runtime_error if there is none.
template <typename Function>
Function torch_cuda(const char* name) {
#ifdef _WIN32
  constexpr const char* kLibrary = "torch_cuda.dll";
#else
  constexpr const char* kLibrary = "libtorch_cuda.so";
#endif
  return reinterpret_cast<Function>(runtime::find(kLibrary, name));
}

}  // namespace sage
