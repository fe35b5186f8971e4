"""Making: kernels, conda packages, wheels."""
