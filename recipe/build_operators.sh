#!/usr/bin/env bash
# Compiles the operators against PyTorch's headers, without importing PyTorch, and installs the Python package.
set -euo pipefail

# Binaries shall not tell where they were built ...
for mapping in "$SRC_DIR=." "$PREFIX=/host" "$BUILD_PREFIX=/build"; do
  CXXFLAGS="${CXXFLAGS:-} -ffile-prefix-map=$mapping"
done
export CXXFLAGS
# ... nor look for libraries there.
export LDFLAGS="${LDFLAGS:-}"
export LDFLAGS="${LDFLAGS//-Wl,-rpath,$PREFIX\/lib/}"

"$PYTHON" -m pip install . --no-deps --no-build-isolation --no-compile -v \
  -C cmake.source-dir=csrc/torch \
  -C wheel.install-dir=sageattention \
  -C cmake.define.SAGE_TORCH_DIR="$SP_DIR/torch" \
  -C cmake.define.SAGE_VERSION="$SAGE_VERSION" \
  -C cmake.define.SAGE_CUDA_VERSION="$SAGE_CUDA_VERSION"

# Where pip was run is not part of the package.
rm -f "$SP_DIR"/sageattention-*.dist-info/direct_url.json
