// The attention operators on CUDA tensors. Shapes, units and errors: sageattention/core.py, which validates for all
// devices; the checks here are those without which a direct call could read or write out of bounds.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

#include <string>
#include <tuple>

namespace sage {

// `kernel`: "sm80" (mma.sync) or "sm90" (wgmma, compute capability 9.0 only); "auto" takes the best there is.
std::tuple<at::Tensor, at::Tensor> qk_int8_pv_f16(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                  c10::string_view tensor_layout, bool is_causal, double sm_scale,
                                                  bool smooth_k, bool return_lse, c10::string_view kernel);

}  // namespace sage
