// tensor.h in LibTorch's stable ABI: of PyTorch only the C functions that it had in 2.9 and keeps.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

// That of aten::fill_, which the header does not have, since it is generated: generated/c_shim_aten.h.
extern "C" AOTI_TORCH_EXPORT AOTITorchError aoti_torch_aten_fill__Scalar(AtenTensorHandle self, double value);

namespace sage {

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text(std::ios_base::out);  // the constructor without arguments is one that the promised glibc's libstdc++ lacks
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

// PyTorch has printed why.
#define SAGE_CHECK_CALL(call) \
  if ((call) != AOTI_TORCH_SUCCESS) ::sage::fail(SAGE_PACKAGE ": PyTorch refused " #call)

// The ABI has one kind of error.
#define TORCH_CHECK(condition, ...) \
  if (!(condition)) ::sage::fail(__VA_ARGS__)
#define TORCH_CHECK_VALUE TORCH_CHECK
#define TORCH_CHECK_TYPE TORCH_CHECK

class IntArrayRef {
 public:
  IntArrayRef(const int64_t* data, size_t size) : data_(data), size_(size) {}
  IntArrayRef(const std::vector<int64_t>& values) : IntArrayRef(values.data(), values.size()) {}
  IntArrayRef(const std::initializer_list<int64_t>& values) : IntArrayRef(values.begin(), values.size()) {}

  const int64_t* data() const { return data_; }
  const int64_t* begin() const { return data_; }
  const int64_t* end() const { return data_ + size_; }
  size_t size() const { return size_; }
  int64_t operator[](size_t index) const { return data_[index]; }
  IntArrayRef slice(size_t start, size_t count) const { return {data_ + start, count}; }
  bool operator==(IntArrayRef other) const {
    return size_ == other.size_ && std::memcmp(data_, other.data_, size_ * sizeof(int64_t)) == 0;
  }

  friend std::ostream& operator<<(std::ostream& out, IntArrayRef values) {
    out << '[';
    for (size_t i = 0; i < values.size_; ++i) out << (i == 0 ? "" : ", ") << values[i];
    return out << ']';
  }

 private:
  const int64_t* data_;
  size_t size_;
};

// A dtype by PyTorch's own number, which is asked of it: no part of the ABI.
struct ScalarType {
  int32_t code;

  bool operator==(ScalarType other) const { return code == other.code; }
};

inline const ScalarType kByte{aoti_torch_dtype_uint8()};
inline const ScalarType kInt{aoti_torch_dtype_int32()};
inline const ScalarType kHalf{aoti_torch_dtype_float16()};
inline const ScalarType kBFloat16{aoti_torch_dtype_bfloat16()};
inline const ScalarType kFloat{aoti_torch_dtype_float32()};
inline const ScalarType kBool{aoti_torch_dtype_bool()};

inline std::ostream& operator<<(std::ostream& out, ScalarType type) {
  for (const auto& [known, name] : {std::pair{kByte, "Byte"}, {kInt, "Int"}, {kHalf, "Half"},
                                    {kBFloat16, "BFloat16"}, {kFloat, "Float"}, {kBool, "Bool"}}) {
    if (type == known) return out << name;
  }
  return out << "ScalarType " << type.code;
}

struct Device {
  int32_t type, index;

  bool operator==(Device other) const { return type == other.type && index == other.index; }

  friend std::ostream& operator<<(std::ostream& out, Device device) {
    if (device.type == aoti_torch_device_type_cpu()) return out << "cpu";
    return out << (device.type == aoti_torch_device_type_cuda() ? "cuda:" : "device:") << device.index;
  }
};

// Asks PyTorch once for what does not change as long as nobody resizes the tensor, which nobody does during a call.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle owned) : handle_(owned, [](AtenTensorHandle one) { aoti_torch_delete_tensor_object(one); }) {
    int64_t *sizes = nullptr, *strides = nullptr;
    SAGE_CHECK_CALL(aoti_torch_get_dim(owned, &dim_));
    SAGE_CHECK_CALL(aoti_torch_get_numel(owned, &numel_));
    SAGE_CHECK_CALL(aoti_torch_get_sizes(owned, &sizes));
    SAGE_CHECK_CALL(aoti_torch_get_strides(owned, &strides));
    SAGE_CHECK_CALL(aoti_torch_get_data_ptr(owned, &data_));
    SAGE_CHECK_CALL(aoti_torch_get_dtype(owned, &type_.code));
    SAGE_CHECK_CALL(aoti_torch_get_device_type(owned, &device_.type));
    SAGE_CHECK_CALL(aoti_torch_get_device_index(owned, &device_.index));
    sizes_ = sizes;
    strides_ = strides;
  }

  bool defined() const { return handle_ != nullptr; }
  int64_t dim() const { return dim_; }
  int64_t numel() const { return numel_; }
  int64_t size(int64_t dimension) const { return sizes_[dimension]; }
  int64_t stride(int64_t dimension) const { return strides_[dimension]; }
  IntArrayRef sizes() const { return {sizes_, static_cast<size_t>(dim_)}; }
  IntArrayRef strides() const { return {strides_, static_cast<size_t>(dim_)}; }
  size_t element_size() const { return aoti_torch_dtype_element_size(type_.code); }
  void* data_ptr() const { return data_; }
  ScalarType scalar_type() const { return type_; }
  Device device() const { return device_; }
  int32_t get_device() const { return device_.index; }
  AtenTensorHandle get() const { return handle_.get(); }

  bool is_contiguous() const {
    bool answer = false;
    SAGE_CHECK_CALL(aoti_torch_is_contiguous(get(), &answer));
    return answer;
  }
  Tensor as_strided(IntArrayRef sizes, IntArrayRef strides) const {
    constexpr int64_t kMoved = 0;  // what that function calls the offset is added to the tensor's
    AtenTensorHandle answer = nullptr;
    SAGE_CHECK_CALL(aoti_torch__reinterpret_tensor(get(), static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                   kMoved, &answer));
    return Tensor(answer);
  }
  const Tensor& copy_(const Tensor& source) const {
    SAGE_CHECK_CALL(aoti_torch_copy_(get(), source.get(), 0));
    return *this;
  }
  void zero_() const { SAGE_CHECK_CALL(aoti_torch_zero_(get())); }
  void fill_(double value) const { SAGE_CHECK_CALL(aoti_torch_aten_fill__Scalar(get(), value)); }

 private:
  std::shared_ptr<AtenTensorOpaque> handle_;
  const int64_t* sizes_ = nullptr;
  const int64_t* strides_ = nullptr;
  int64_t dim_ = 0, numel_ = 0;
  void* data_ = nullptr;
  ScalarType type_{};
  Device device_{};
};

inline Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, ScalarType type, const Tensor& beside) {
  AtenTensorHandle answer = nullptr;
  // Where it fails, mostly for want of memory: who catches errors for that looks for these words.
  if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), type.code, beside.device().type,
                               beside.device().index, &answer) != AOTI_TORCH_SUCCESS) {
    fail(SAGE_PACKAGE ": out of memory? PyTorch refused aoti_torch_empty_strided");
  }
  return Tensor(answer);
}

inline Tensor empty(IntArrayRef sizes, ScalarType type, const Tensor& beside) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= sizes[i] > 0 ? sizes[i] : 1) strides[i] = stride;
  return empty_strided(sizes, strides, type, beside);
}

// ── Values on their way through the dispatcher: 64 bits each ──────────────────────────────────────────────

// Another owner of the same tensor.
inline StableIValue to_value(const Tensor& tensor) {
  AtenTensorHandle handle = nullptr;
  SAGE_CHECK_CALL(aoti_torch_new_tensor_handle(tensor.get(), &handle));
  return reinterpret_cast<StableIValue>(handle);
}

template <typename T>
struct FromValue {
  static T get(StableIValue value) {
    static_assert(std::is_arithmetic_v<T>);
    T number;
    std::memcpy(&number, &value, sizeof number);
    return number;
  }
};
template <>
struct FromValue<Tensor> {
  static Tensor get(StableIValue value) { return Tensor(reinterpret_cast<AtenTensorHandle>(value)); }
};
template <typename T>
struct FromValue<std::optional<T>> {
  static std::optional<T> get(StableIValue value) {
    if (value == 0) return std::nullopt;
    const std::unique_ptr<StableIValue> inner(reinterpret_cast<StableIValue*>(value));
    return FromValue<T>::get(*inner);
  }
};

// A function as the dispatcher calls it: arguments come and results go in `stack`, tensors with it as their owner.
template <auto function>
struct Boxed;
template <typename... Results, typename... Arguments, std::tuple<Results...> (*function)(Arguments...)>
struct Boxed<function> {
  static void call(StableIValue* stack, uint64_t, uint64_t) { call(stack, std::index_sequence_for<Arguments...>()); }

  template <size_t... i>
  static void call(StableIValue* stack, std::index_sequence<i...>) {
    const std::tuple<std::decay_t<Arguments>...> arguments{FromValue<std::decay_t<Arguments>>::get(stack[i])...};
    const auto results = std::apply(function, arguments);
    std::apply([&](const auto&... result) { size_t at = 0; ((stack[at++] = to_value(result)), ...); }, results);
  }
};

// An operator: its schema, and what computes it.
struct Operator {
  const char* name;
  const char* arguments;  // and results
  void (*implementation)(StableIValue* stack, uint64_t inputs, uint64_t outputs);
};

#define SAGE_OPERATOR(name, arguments) \
  { #name, arguments, &::sage::Boxed<&::sage::name>::call }

template <size_t count>
void register_operators(const char* name_space, const Operator (&operators)[count]) {
  // For the life of the process.
  TorchLibraryHandle schemas = nullptr, implementations = nullptr;
  SAGE_CHECK_CALL(aoti_torch_library_init_def(name_space, "csrc/torch/abi/stable.h", 0, &schemas));
  SAGE_CHECK_CALL(aoti_torch_library_init_impl(name_space, SAGE_DEVICE, "csrc/torch/abi/stable.h", 0, &implementations));
  for (const Operator& one : operators) {
    SAGE_CHECK_CALL(aoti_torch_library_def(schemas, (std::string(one.name) + one.arguments).c_str()));
    SAGE_CHECK_CALL(aoti_torch_library_impl(implementations, one.name, one.implementation));
  }
}

}  // namespace sage
