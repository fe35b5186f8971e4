#!/usr/bin/env bash
# Compiles every kernel for every architecture asked for, and installs the set with its manifest.
set -euo pipefail

# An activated toolkit from conda-forge sets these for its own taste; the list is ours, and its order too.
unset CUDAARCHS NVCC_APPEND_FLAGS

cmake -S csrc/kernels -B build -G Ninja \
  -DSAGE_NVCC="$(command -v nvcc)" \
  -DSAGE_PACKAGE="$SAGE_PACKAGE" \
  -DSAGE_VERSION="$SAGE_VERSION" \
  -DSAGE_CUDA_VERSION="$SAGE_CUDA_VERSION" \
  -DSAGE_ARCHITECTURES="$SAGE_ARCHITECTURES" \
  -DSAGE_PTX="${SAGE_PTX:-}"
cmake --build build
cmake --install build --prefix "$PREFIX/share/$SAGE_PACKAGE"
