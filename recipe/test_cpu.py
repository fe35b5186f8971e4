"""The installed package imports without a GPU and computes attention on CPU tensors."""

import importlib
import os

import torch

package = importlib.import_module(os.environ["SAGE_PACKAGE"])
attention, limit = (package.sageattn, 0.05) if hasattr(package, "sageattn") else (package.sageattn3_blackwell, 0.3)
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 65, 64, dtype=torch.float16) for _ in range(3))
out = attention(q, k, v, tensor_layout="HND")
exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
error = ((out.double() - exact).abs().sum() / exact.abs().sum()).item()
assert out.shape == q.shape, out.shape
assert out.dtype == q.dtype, out.dtype
assert error < limit, f"relative L1 error {error:.4f} against float64"
print(f"{package.__name__} {package.__version__}: relative L1 error {error:.4f} on the CPU")
