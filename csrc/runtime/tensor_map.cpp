#include "runtime/tensor_map.h"

#include <algorithm>

#include "runtime/context.h"
#include "runtime/kernel_store.h"

namespace sage::runtime {

TensorMap encode_tensor_map(int device, const TensorView& view, int32_t batch, int32_t heads, int32_t tokens,
                            int32_t channels, int32_t box_tokens) {
  const auto size = [](int32_t value) { return static_cast<uint64_t>(value); };
  // The stride of a dimension of size 1 is 0 in a view; the driver wants a multiple of 16 bytes, and never uses it.
  const auto bytes = [](int64_t stride) { return std::max<uint64_t>(static_cast<uint64_t>(stride) * 2, 16); };
  const uint64_t sizes[] = {size(channels), size(tokens), size(heads), size(batch)};
  const uint64_t strides[] = {bytes(view.token_stride), bytes(view.head_stride), bytes(view.batch_stride)};
  const uint32_t box_sizes[] = {64, static_cast<uint32_t>(box_tokens), 1, 1};
  const uint32_t element_strides[] = {1, 1, 1, 1};
  TensorMap map{};
  const Driver& driver = Driver::get();
  const CurrentContext current(driver, device, KernelStore::get().device(device).context);
  driver.check(driver.cuTensorMapEncodeTiled(&map, kTensorMapDataTypeUint16, 4, view.data, sizes, strides, box_sizes,
                                             element_strides, kTensorMapInterleaveNone,
                                             kTensorMapSwizzle128B,
                                             kTensorMapL2Promotion256B, kTensorMapOutOfBoundsZero),
               "describing a tensor to the copy engine");
  return map;
}

}  // namespace sage::runtime
