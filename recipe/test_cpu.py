"""The installed package imports without a GPU and computes attention on CPU tensors."""

import torch

import sageattention

torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 65, 64, dtype=torch.float16) for _ in range(3))
out = sageattention.sageattn(q, k, v, tensor_layout="HND")
exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
error = ((out.double() - exact).abs().sum() / exact.abs().sum()).item()
assert out.shape == q.shape, out.shape
assert out.dtype == q.dtype, out.dtype
assert error < 0.05, f"relative L1 error {error:.4f} against float64"
print(f"sageattention {sageattention.__version__}: relative L1 error {error:.4f} on the CPU")
