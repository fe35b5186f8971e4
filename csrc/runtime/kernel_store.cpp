#include "runtime/kernel_store.h"

#include <charconv>
#include <cstring>
#ifdef _WIN32
#include <filesystem>
#endif
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "runtime/context.h"

namespace sage::runtime {

namespace {

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text.empty() ? "none" : text;
}

Architecture architecture_of(const std::string& folder) {
  int number = 0;  // strtol would ask for glibc 2.38, compiled against that or a later one
  std::from_chars(folder.data() + folder.find('_') + 1, folder.data() + folder.size(), number);
  return {number, folder.back() == 'a', folder.compare(0, 8, "compute_") == 0};
}

// Of a Jetson, IGX or DRIVE: Orin, and Thor by its name before CUDA 13 and since. The CUDA C++ Programming Guide (binary compatibility) promises nothing between these
// and others.
bool is_tegra(int capability) { return capability == 87 || capability == 101 || capability == 110; }

// How well code built for an architecture suits a device: 0 not at all, else larger is better.
//   sm_XYa  runs on X.Y alone; sm_XY on X.Y and later minors of X; compute_XY (PTX) on X.Y and everything later.
int fitness(const Architecture& code, int capability) {
  if (code.number > capability || (code.that_alone && code.number != capability)) return 0;
  if (code.ptx) return 1 + code.number;
  if (code.number / 10 != capability / 10) return 0;
  if (code.number != capability && (is_tegra(code.number) || is_tegra(capability))) return 0;
  return 1000 + 2 * code.number + (code.that_alone ? 1 : 0);
}

// Python gives paths as the system does, and on Windows in UTF-8, which there no narrow path is.
auto file_path(const std::string& path) {
#ifndef _WIN32
  return path;
#elif defined(__cpp_char8_t)
  return std::filesystem::path(std::u8string(path.begin(), path.end()));
#else
  return std::filesystem::u8path(path);
#endif
}

std::string read_kernel(const std::string& path) {
  std::ifstream file(file_path(path), std::ios::binary);
  std::string code((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  bool whole = !code.empty();
  // An ELF names its section table's place at bytes 40 (offset), 58 (entry size) and 60 (entries): past the end of the
  // file it was cut short, which the driver would not notice everywhere.
  if (path.compare(path.size() - 6, 6, ".cubin") == 0) {
    whole = code.size() >= 64 && code.compare(0, 4, "\x7f" "ELF") == 0;
    if (whole) {
      uint64_t offset;
      uint16_t entry_size, entries;
      std::memcpy(&offset, code.data() + 40, sizeof offset);
      std::memcpy(&entry_size, code.data() + 58, sizeof entry_size);
      std::memcpy(&entries, code.data() + 60, sizeof entries);
      whole = offset <= code.size() && uint64_t{entry_size} * entries <= code.size() - offset;
    }
  }
  if (!whole) {
    throw std::runtime_error(SAGE_PACKAGE ": the kernel file " + path +
                             (file.is_open() ? " is damaged; reinstall the package"
                                             : " is missing; reinstall the package, unless a program that was exported for another GPU asks for it"));
  }
  return code;
}

// A kernel may be loaded for the first time while a CUDA graph is being captured: loading is none of the graph's work.
class UncapturedScope {
 public:
  explicit UncapturedScope(const Driver& driver) : driver_(driver) { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }
  ~UncapturedScope() { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }
  UncapturedScope(const UncapturedScope&) = delete;
  UncapturedScope& operator=(const UncapturedScope&) = delete;

 private:
  const Driver& driver_;
  int mode_ = kStreamCaptureModeRelaxed;
};

}  // namespace

KernelStore& KernelStore::get() {
  // Never destroyed: at exit the driver may be gone before static destructors run.
  static KernelStore* store = new KernelStore;
  return *store;
}

void KernelStore::set_directory(std::string directory, std::vector<std::string> architectures) {
  const std::lock_guard<std::mutex> lock(mutex_);
  directory_ = std::move(directory);
  architectures_ = std::move(architectures);
  devices_.clear();
  libraries_.clear();
}

KernelStore::Used& KernelStore::used(int index) {
  const auto known = devices_.find(index);
  if (known != devices_.end()) return known->second;

  const Driver& driver = Driver::get();
  const auto attribute = [&](int which) {
    int value = 0;
    driver.check(driver.cuDeviceGetAttribute(&value, which, index), "reading the compute capability");
    return value;
  };
  const int major = attribute(kDeviceAttributeComputeCapabilityMajor), minor = attribute(kDeviceAttributeComputeCapabilityMinor);
  Used device{};
  device.multiprocessors = attribute(kDeviceAttributeMultiprocessorCount);
  int best = 0;
  for (const std::string& folder : architectures_) {
    const int fit = fitness(architecture_of(folder), major * 10 + minor);
    if (fit > best) {
      best = fit;
      device.folder = folder;
      device.built_for = architecture_of(folder);
    }
  }
  if (best == 0) {
    throw std::runtime_error(SAGE_PACKAGE ": no kernel for compute capability " + std::to_string(major) + "." +
                             std::to_string(minor) + " (device " + std::to_string(index) + "); this build has " +
                             join(architectures_) + " in " + directory_ + ". `python -m " SAGE_PACKAGE "` says what to install");
  }
  // Retained for the life of the process, as PyTorch does.
  driver.check(driver.cuDevicePrimaryCtxRetain(&device.context, index), "retaining the device's primary context");
  return devices_.emplace(index, std::move(device)).first->second;
}

CUkernel KernelStore::kernel(Used& device, const Launch& launch) {
  const Driver& driver = Driver::get();
  auto found = device.kernels.find(launch.instance);
  if (found == device.kernels.end()) found = device.kernels.emplace(launch.instance, load(device, launch)).first;
  Kernel& kernel = found->second;
  if (launch.shared_bytes > kernel.most_shared_bytes) {
    const UncapturedScope uncaptured(driver);
    driver.check(driver.cuKernelSetAttribute(kFunctionAttributeMaxDynamicSharedBytes, static_cast<int>(launch.shared_bytes), kernel.handle, launch.device),
                 "asking for shared memory for", launch.instance.c_str());
    kernel.most_shared_bytes = launch.shared_bytes;
  }
  return kernel.handle;
}

KernelStore::Kernel KernelStore::load(const Used& device, const Launch& launch) {
  const Driver& driver = Driver::get();
  const UncapturedScope uncaptured(driver);
  CUlibrary& library = libraries_[{device.folder, launch.instance}];
  const std::string path =
      directory_ + "/" + device.folder + "/" + launch.instance + (device.built_for.ptx ? ".ptx" : ".cubin");
  if (library == nullptr) {
    const std::string code = read_kernel(path);
    driver.check(driver.cuLibraryLoadData(&library, code.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0),
                 "loading", path.c_str());
  }
  Kernel kernel;
  driver.check(driver.cuLibraryGetKernel(&kernel.handle, library, launch.entry),
               ("finding the kernel " + std::string(launch.entry) + " in").c_str(), path.c_str());
  return kernel;
}

void KernelStore::launch(const Launch& launch, void* params) {
  const Driver& driver = Driver::get();
  std::unique_lock<std::mutex> lock(mutex_);
  Used& device = used(launch.device);
  const CurrentContext current(driver, launch.device, device.context);
  const CUkernel kernel = this->kernel(device, launch);
  // Code compiled for 9.0 or later waits itself for the kernel before (griddepcontrol.wait), and may start sooner; PTX of 8.0 does not.
  const bool waits = device.built_for.number >= 90;
  lock.unlock();
  CUlaunchAttribute attributes[2]{};
  uint32_t count = 0;
  if (launch.cluster > 1) {
    CUlaunchAttribute& cluster = attributes[count++];
    cluster.id = kLaunchAttributeClusterDimension;
    cluster.value.cluster_dimension[0] = launch.cluster;
    cluster.value.cluster_dimension[1] = cluster.value.cluster_dimension[2] = 1;
  }
  if (waits) {
    CUlaunchAttribute& overlap = attributes[count++];
    overlap.id = kLaunchAttributeProgrammaticStreamSerialization;
    overlap.value.programmatic_stream_serialization = 1;
  }
  CUlaunchConfig config{};
  config.grid_x = launch.grid;
  config.grid_y = config.grid_z = 1;
  config.block_x = launch.block;
  config.block_y = config.block_z = 1;
  config.shared_bytes = launch.shared_bytes;
  config.stream = launch.stream;
  config.attributes = attributes;
  config.attribute_count = count;
  void* arguments[] = {params};
  driver.check(driver.cuLaunchKernelEx(&config, kernel, arguments, nullptr), "launching", launch.instance.c_str());
}

KernelStore::Device KernelStore::device(int index) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return used(index);
}

std::string KernelStore::architecture(int index) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return used(index).folder;
}

}  // namespace sage::runtime
