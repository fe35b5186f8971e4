// csrc/torch/'s operators on CPU tensors: all that a call does on the host as it is, but for the driver, and in the place of csrc/runtime/'s
// a store of kernels that are compiled for the CPU, DIRECTORY/ARCHITECTURE/INSTANCE.so (launch.cpp).
#include <dlfcn.h>

#include <string_view>

#include "must_wait.h"
#include "runtime/driver.cpp"
#include "runtime/tensor_map.cpp"
#include "tensor_map.h"
#include "torch/arguments.cpp"
#include "torch/attention.cpp"
#include "torch/attention_kernels.cpp"
#include "torch/few_tokens.cpp"
#include "torch/hopper_in_16_bits.cpp"
#include "torch/mask.cpp"
#include "torch/ops.cpp"
#include "torch/plan/faster_in_16_bits.cpp"
#include "torch/plan/split_kv.cpp"
#include "torch/plan/tiles_in_16_bits.cpp"
#include "torch/plan/tiling.cpp"
#include "torch/quantise.cpp"

#ifdef SAGE_STABLE_ABI
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

// PyTorch's from 2.9 on, which is where the stable ABI begins; all else of it the 2.8 of the tests has.
extern "C" AOTITorchError aoti_torch_aten_fill__Scalar(AtenTensorHandle self, double value) {
  return aoti_torch_cpu_fill__Scalar(self, value);
}
#endif

namespace sage {

namespace runtime {

int order_of_threads;  // launch.cpp's seed

KernelStore& KernelStore::get() {
  static KernelStore store;
  return store;
}

void KernelStore::set_directory(std::string directory, std::vector<std::string> architectures) {
  directory_ = std::move(directory);
  architectures_ = std::move(architectures);
}

std::string KernelStore::architecture(int) { return architectures_.at(0); }
// Of few multiprocessors, so that a block of threads that stays computes several tiles.
KernelStore::Device KernelStore::device(int) {
  const std::string name = architecture(0);
  return {5, nullptr, {std::stoi(name.substr(3)), name.back() == 'a', false}};
}

namespace {

using Function = const char* (*)(const void* params, int grid, int cluster, int threads, uint32_t shared_bytes, int seed, const char* (*before)(),
                                 gpu::MustWait must_wait);
struct alignas(64) Line { char bytes[64]; };

struct Launched {
  Launch launch;
  Function function;
  std::vector<Line> params;
  gpu::MustWait must_wait;
};
std::vector<Launched> launched;  // and not yet run
std::string failure, launches;

// What the caller's kernels write, which a call's first kernel may overlap: there, or 255 before.
struct Written {
  void* to;
  std::vector<char> bytes;
};
std::vector<Written> callers;

void end_callers() {
  for (const Written& written : callers) std::memcpy(written.to, written.bytes.data(), written.bytes.size());
}
void begin_callers() {
  for (const Written& written : callers) std::memset(written.to, 0xff, written.bytes.size());
}

// Runs the last one; null, or what went wrong. The one before it, which it may overlap, runs when it is waited for and no sooner, so that whatever is
// read without a wait, or after a wait for a kernel that itself did not wait, is not yet there.
const char* run_last() {
  if (launched.empty()) {
    end_callers();
    return nullptr;
  }
  const Launched last = std::move(launched.back());
  launched.pop_back();
  const Launch& launch = last.launch;
  const bool first = last.must_wait == gpu::kBeforeEnd;
  if (first) begin_callers();
  const char* wrong = last.function(last.params.data(), launch.grid, launch.cluster, launch.block, launch.shared_bytes, order_of_threads, run_last,
                                    last.must_wait);
  if (first) end_callers();
  if (wrong != nullptr && failure.empty()) failure = launch.instance + ": " + wrong;
  return failure.empty() ? nullptr : failure.c_str();
}

void run_all() {
  while (!launched.empty()) {
    const size_t kernels = launched.size();
    run_last();
    if (kernels > 1 && !launched.empty() && failure.empty()) failure = "a kernel has ended, and the one before it has not been waited for";
  }
  TORCH_CHECK(failure.empty(), std::exchange(failure, {}));
}

}  // namespace

void KernelStore::launch(const Launch& launch, void* params) {
  launches += std::string(launch.entry) + " " + std::to_string(launch.grid) + " " + std::to_string(launch.block) + " " +
              std::to_string(launch.cluster) + "\n";
  const std::string_view entry = launch.entry;
  gpu::MustWait must_wait = gpu::kNever;
  if (device(launch.device).built_for.number < 90) {
    run_all();
    end_callers();
  } else {
    const bool others_at_once = entry.starts_with("quant_v") || entry.starts_with("quant_kv");
    must_wait = launched.empty() ? gpu::kBeforeEnd : others_at_once ? gpu::kNever : gpu::kBeforeOthers;
    if (!launched.empty() && launched.back().must_wait != gpu::kNever) {  // this one starts when that one has waited
      Launched last = std::move(launched.back());
      launched.pop_back();
      run_all();
      end_callers();
      launched.push_back(std::move(last));
    }
  }
  const std::string path = directory_ + "/" + architecture(launch.device) + "/" + launch.instance + ".so";
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(library != nullptr, dlerror());
  const size_t bytes = *static_cast<const size_t*>(dlsym(library, "params_bytes"));
  std::vector<Line> copied((bytes + sizeof(Line) - 1) / sizeof(Line));
  std::memcpy(copied.data(), params, bytes);
  launched.push_back({launch, reinterpret_cast<Function>(dlsym(library, "launch")), std::move(copied), must_wait});
  // A call's last, attention itself or what adds its parts up, after which its workspace is gone.
  using SplitKv = Sm80QkF16PvF16SplitKv;
  const bool in_parts = entry.starts_with("sm80_qk_f16_pv_f16_split_kv") && static_cast<const SplitKv::Params*>(params)->part_out != nullptr;
  if (entry.starts_with("sm") && !in_parts) run_all();
}

// There is no stream, no context, and of the driver's functions one that does something.
void* find(const char*, const char* function) {
  const std::string_view name = function;
  if (name == "cuTensorMapEncodeTiled") return reinterpret_cast<void*>(&gpu::encode);
  if (name.starts_with("cu")) return reinterpret_cast<void*>(+[] { return kCudaSuccess; });
  TORCH_CHECK(name == "aoti_torch_get_current_cuda_stream", "there is no ", function, " for CPU tensors");
  return reinterpret_cast<void*>(+[](int32_t, void** stream) -> int32_t {
    *stream = nullptr;
    return 0;
  });
}

}  // namespace runtime

}  // namespace sage

// Other than 0: blocks, warps and lanes in random order.
extern "C" void set_order_of_threads(int seed) { sage::runtime::order_of_threads = seed; }

// The caller's kernels are about to write these bytes, as they are now, and have not: they are 255.
extern "C" void written_late(void* bytes, size_t count) {
  char* first = static_cast<char*>(bytes);
  sage::runtime::callers.push_back({bytes, {first, first + count}});
  std::memset(bytes, 0xff, count);
}

extern "C" void end_callers() {
  sage::runtime::end_callers();
  sage::runtime::callers.clear();
}

// Those since it was asked last: a line each, of the kernel, blocks of threads, threads of one and blocks of a cluster.
extern "C" const char* launches() {
  static std::string last;
  last = std::exchange(sage::runtime::launches, {});
  return last.c_str();
}

// How Hopper's kernel that quantises shares out the output of a call without a mask, on so many multiprocessors: rows that a block of threads computes at a time,
// blocks of a cluster, parted tiles, parts, whether first rows come first; and how long it expects that to take.
extern "C" float tiling(int kernel, int heads, int qo_len, int kv_len, int head_dim, int multiprocessors, int32_t* how) {
  const sage::AttentionShape shape{1, heads, heads, qo_len, kv_len, head_dim, head_dim};
  const sage::Call call{sage::attention_kernel(kernel), shape, {}, {}, {}, {}, {}, 1.0, sage::AttentionOptions(0)};
  const sage::Tiling tiling = sage::tiling_of(call, multiprocessors, sage::MaskForm::kNone);
  for (const int32_t number : {tiling.block_rows, tiling.cluster, tiling.parted_tiles, tiling.parts, int32_t{tiling.first_rows_first}}) *how++ = number;
  return tiling.time;
}
