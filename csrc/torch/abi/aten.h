// tensor.h in ATen.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <optional>
#include <utility>

namespace sage {

using at::IntArrayRef;
using at::ScalarType;
using at::Tensor;
using at::kBFloat16;
using at::kBool;
using at::kByte;
using at::kChar;
using at::kFloat;
using at::kHalf;
using at::kInt;

inline Tensor empty(IntArrayRef sizes, ScalarType type, const Tensor& beside) {
  return at::empty(sizes, beside.options().dtype(type));
}

// The operator itself: which backends a caller has allowed, and autocast, change nothing.
inline std::pair<Tensor, Tensor> cudnn_attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias,
                                                 bool return_lse, bool is_causal, double sm_scale) {
  const auto result =
      at::_scaled_dot_product_cudnn_attention(q, k, v, bias, return_lse, 0.0, is_causal, false, sm_scale);
  return {std::get<0>(result), std::get<1>(result)};
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
