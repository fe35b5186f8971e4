// The calling thread's current CUDA context.
#pragma once

#include "runtime/driver.h"

namespace sage::runtime {

// Makes a device's context current for as long as this lives, unless one of that device is: PyTorch's own kernels too run in whichever that is, as
// in a green context. A thread that has not called CUDA yet has none.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, CUdevice device, CUcontext wanted) : driver_(driver) {
    CUcontext current = nullptr;
    driver_.check(driver_.cuCtxGetCurrent(&current), "reading the current context");
    if (current != nullptr && current != wanted) {
      CUdevice its = -1;
      driver_.check(driver_.cuCtxGetDevice(&its), "reading the current device");
      if (its == device) wanted = current;
    }
    pushed_ = current != wanted;
    if (pushed_) driver_.check(driver_.cuCtxPushCurrent(wanted), "making the tensor's device current");
  }
  ~CurrentContext() {
    CUcontext popped;
    if (pushed_) driver_.cuCtxPopCurrent(&popped);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const Driver& driver_;
  bool pushed_;
};

}  // namespace sage::runtime
