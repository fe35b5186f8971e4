// Finds, loads and launches the kernels of a cubin set: one file per kernel instance and architecture,
// <directory>/<architecture>/<instance>.cubin (sm_80, sm_90a, ...) or .ptx (compute_80).
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "runtime/driver.h"

namespace sage::runtime {

struct Launch {
  std::string instance;  // file name without its ending
  const char* entry;     // the __global__ function in it
  int device;
  CUstream stream;
  uint32_t grid;
  uint32_t block;
  uint32_t shared_bytes;
  uint32_t cluster = 1;  // blocks of a cluster, of which `grid` is a multiple (sm_90 on)
};

// What code in a folder was built for: sm_90a, sm_80, compute_80.
struct Architecture {
  int number = 0;           // 90
  bool that_alone = false;  // sm_90a
  bool ptx = false;         // compute_80
};

class KernelStore {
 public:
  struct Device {
    int multiprocessors;
    CUcontext context;  // the primary one, which is PyTorch's too
    Architecture built_for;
  };

  // The process's only store. Safe to use from several threads.
  static KernelStore& get();

  // Names the cubin set. `architectures` are the folders in it.
  void set_directory(std::string directory, std::vector<std::string> architectures);

  // `params` is the kernel's one argument. Asynchronous on the stream; the current context is left as it was.
  void launch(const Launch& launch, void* params);

  // A device and what its kernels were built for; throws, naming the folders there are, if it can run none of them.
  Device device(int index);

  // The folder whose kernels a device runs; throws as `device` does.
  std::string architecture(int index);

 private:
  struct Kernel {
    CUkernel handle = nullptr;
    uint32_t most_shared_bytes = 48 << 10;  // that a launch may take: so much without asking
  };
  struct Used : Device {
    std::string folder;
    std::map<std::string, Kernel> kernels;  // by instance
  };

  Used& used(int index);
  CUkernel kernel(Used& device, const Launch& launch);
  Kernel load(const Used& device, const Launch& launch);

  std::mutex mutex_;
  std::string directory_;
  std::vector<std::string> architectures_;
  std::map<int, Used> devices_;
  std::map<std::pair<std::string, std::string>, CUlibrary> libraries_;  // by architecture and instance
};

}  // namespace sage::runtime
