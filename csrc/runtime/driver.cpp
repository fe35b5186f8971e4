#include "runtime/driver.h"

#include <stdexcept>
#include <string>

#include "runtime/library.h"

namespace sage::runtime {

namespace {

#ifdef _WIN32
constexpr const char* kLibrary = "nvcuda.dll";
#else
constexpr const char* kLibrary = "libcuda.so.1";
#endif

template <typename Function>
void load(Function& function, const char* symbol) {
  function = reinterpret_cast<Function>(find(kLibrary, symbol));
}

Driver open() {
  Driver driver{};
  load(driver.cuInit, "cuInit");
  load(driver.cuGetErrorString, "cuGetErrorString");
  load(driver.cuDeviceGetAttribute, "cuDeviceGetAttribute");
  load(driver.cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  load(driver.cuCtxGetCurrent, "cuCtxGetCurrent");
  load(driver.cuCtxGetDevice, "cuCtxGetDevice");
  load(driver.cuCtxPushCurrent, "cuCtxPushCurrent_v2");
  load(driver.cuCtxPopCurrent, "cuCtxPopCurrent_v2");
  load(driver.cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
  load(driver.cuLibraryLoadData, "cuLibraryLoadData");
  load(driver.cuLibraryGetKernel, "cuLibraryGetKernel");
  load(driver.cuKernelSetAttribute, "cuKernelSetAttribute");
  load(driver.cuLaunchKernelEx, "cuLaunchKernelEx");
  load(driver.cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled");
  driver.check(driver.cuInit(0), "initialising the CUDA driver");
  return driver;
}

}  // namespace

const Driver& Driver::get() {
  static const Driver driver = open();
  return driver;
}

void Driver::fail(CUresult result, const char* what, const char* which) const {
  const char* text = nullptr;
  if (cuGetErrorString(result, &text) != kCudaSuccess || text == nullptr) text = "unknown error";
  throw std::runtime_error(std::string(SAGE_PACKAGE ": ") + what + (*which == '\0' ? "" : " ") + which + ": " + text +
                           " (CUDA driver error " + std::to_string(result) + ")");
}

}  // namespace sage::runtime
