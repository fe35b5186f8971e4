#!/usr/bin/env bash
# Compiles the operators against PyTorch's headers, without importing PyTorch, and installs the Python package.
set -euo pipefail

# Binaries shall not tell where they were built. PyTorch's headers may be links: without the first flag the compiler
# would name what they point to, which differs from channel to channel.
CXXFLAGS="${CXXFLAGS:-} -fno-canonical-system-headers"
apostrophe="'" escaped="'\\''" # a path may have one
for mapping in "$SRC_DIR=." "$PREFIX=/host" "$BUILD_PREFIX=/build"; do
  CXXFLAGS="$CXXFLAGS '-ffile-prefix-map=${mapping//$apostrophe/$escaped}'"
done
export CXXFLAGS
# PyTorch's libraries are found already loaded: no search path of the build's own environment.
unset LD_RUN_PATH
export LDFLAGS="${LDFLAGS:-}"
export LDFLAGS="${LDFLAGS//-Wl,-rpath,$PREFIX\/lib/}"

# Activated environments name another one.
export CMAKE_GENERATOR=Ninja

# In two steps, because pip notes where it installed a folder or file from: that is no part of the package. Sources without git
# have no commit, and rattler-build leaves a variable out that is empty.
"$PYTHON" -m pip wheel "./$SAGE_PROJECT" --no-deps --no-build-isolation --no-index -v -w dist \
  -C cmake.source-dir="$SRC_DIR/csrc/torch" \
  -C wheel.install-dir="$SAGE_PACKAGE" \
  -C cmake.define.SAGE_PACKAGE="$SAGE_PACKAGE" \
  -C cmake.define.SAGE_TORCH_DIR="$SP_DIR/torch" \
  -C cmake.define.SAGE_TORCH_PREFIX="$PREFIX" \
  -C cmake.define.SAGE_TORCH_RELEASE="$SAGE_TORCH_RELEASE" \
  -C cmake.define.SAGE_VERSION="$SAGE_VERSION" \
  -C cmake.define.SAGE_COMMIT="${SAGE_COMMIT:-}" \
  -C cmake.define.SAGE_CUDA_VERSION="$SAGE_CUDA_VERSION"
"$PYTHON" -m pip install "$SAGE_PACKAGE==$SAGE_VERSION" --no-deps --no-compile --no-index --find-links dist
