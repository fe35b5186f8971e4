// The few entry points of the CUDA driver that are needed to load and launch a kernel, declared here so that building
// needs no CUDA headers and loading no libcuda: a machine without a GPU can still import the package.
// Values and layouts are those of the driver API's stable ABI (cuda.h, CUDA 12.0 on).
#pragma once

#include <cstdint>

namespace sage::runtime {

using CUresult = int;
using CUdevice = int;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUlibrary = struct CUlib_st*;
using CUkernel = struct CUkern_st*;

constexpr CUresult kCudaSuccess = 0;
constexpr int kDeviceAttributeMultiprocessorCount = 16;
constexpr int kDeviceAttributeComputeCapabilityMajor = 75;
constexpr int kDeviceAttributeComputeCapabilityMinor = 76;
constexpr int kFunctionAttributeMaxDynamicSharedBytes = 8;
constexpr int kLaunchAttributeClusterDimension = 4;
constexpr int kLaunchAttributeProgrammaticStreamSerialization = 6;
constexpr int kStreamCaptureModeRelaxed = 2;
constexpr int kTensorMapDataTypeUint16 = 1;
constexpr int kTensorMapInterleaveNone = 0;
constexpr int kTensorMapSwizzle128B = 3;
constexpr int kTensorMapL2Promotion256B = 3;
constexpr int kTensorMapOutOfBoundsZero = 0;

struct CUlaunchAttribute {
  int32_t id;
  int32_t padding;
  union {
    char bytes[64];
    int32_t programmatic_stream_serialization;
    uint32_t cluster_dimension[3];
  } value;
};

struct CUlaunchConfig {
  uint32_t grid_x, grid_y, grid_z;
  uint32_t block_x, block_y, block_z;
  uint32_t shared_bytes;
  CUstream stream;
  CUlaunchAttribute* attributes;
  uint32_t attribute_count;
};
static_assert(sizeof(CUlaunchAttribute) == 72 && sizeof(CUlaunchConfig) == 56);

struct Driver {
  CUresult (*cuInit)(unsigned flags);
  CUresult (*cuGetErrorString)(CUresult error, const char** text);
  CUresult (*cuDeviceGetAttribute)(int* value, int attribute, CUdevice device);
  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext* context, CUdevice device);
  CUresult (*cuCtxGetCurrent)(CUcontext* context);
  CUresult (*cuCtxGetDevice)(CUdevice* device);  // of the current context
  CUresult (*cuCtxPushCurrent)(CUcontext context);
  CUresult (*cuCtxPopCurrent)(CUcontext* context);
  CUresult (*cuThreadExchangeStreamCaptureMode)(int* mode);
  CUresult (*cuLibraryLoadData)(CUlibrary* library, const void* code, void* jit_options, void** jit_values,
                                unsigned jit_count, void* options, void** values, unsigned count);
  CUresult (*cuLibraryGetKernel)(CUkernel* kernel, CUlibrary library, const char* name);
  CUresult (*cuKernelSetAttribute)(int attribute, int value, CUkernel kernel, CUdevice device);
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig* config, CUkernel kernel, void** arguments, void** extra);

  CUresult (*cuTensorMapEncodeTiled)(void* map, int data_type, uint32_t rank, void* address, const uint64_t* sizes,
                                     const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                                     int interleave, int swizzle, int l2_promotion, int out_of_bounds);

  // Opens libcuda at the first call; throws if there is none.
  static const Driver& get();

  // Throws std::runtime_error("<what> <which>: <the driver's words>") unless `result` is success.
  void check(CUresult result, const char* what, const char* which = "") const {
    if (result != kCudaSuccess) fail(result, what, which);
  }

 private:
  [[noreturn]] void fail(CUresult result, const char* what, const char* which) const;
};

}  // namespace sage::runtime
