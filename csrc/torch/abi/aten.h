// tensor.h in ATen.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <optional>

namespace sage {

using at::IntArrayRef;
using at::ScalarType;
using at::Tensor;
using at::kBFloat16;
using at::kBool;
using at::kByte;
using at::kFloat;
using at::kHalf;
using at::kInt;

inline Tensor empty(IntArrayRef sizes, ScalarType type, const Tensor& beside) {
  return at::empty(sizes, beside.options().dtype(type));
}

inline Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, ScalarType type, const Tensor& beside) {
  return at::empty_strided(sizes, strides, beside.options().dtype(type));
}

// An operator: its schema, and what computes it.
struct Operator {
  const char* name;
  const char* arguments;  // and results
  torch::CppFunction (*implementation)();
};

#define SAGE_OPERATOR(name, arguments) \
  { #name, arguments, [] { return torch::CppFunction(&sage::name); } }

template <size_t count>
void register_operators(const char* name_space, const Operator (&operators)[count]) {
  // For the life of the process.
  const auto library = [&](torch::Library::Kind kind, std::optional<c10::DispatchKey> key) {
    return new torch::Library(kind, name_space, key, "csrc/torch/abi/aten.h", 0);
  };
  torch::Library* schemas = library(torch::Library::DEF, std::nullopt);
  torch::Library* implementations = library(torch::Library::IMPL, c10::parseDispatchKey(SAGE_DEVICE));
  for (const Operator& one : operators) {
    schemas->def((std::string(one.name) + one.arguments).c_str());
    implementations->impl(one.name, one.implementation());
  }
}

}  // namespace sage
