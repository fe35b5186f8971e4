@echo on
rem Compiles the operators against PyTorch's headers, without importing PyTorch, and installs the Python package.
rem Nothing of the time and the place of the build in the binary.
set "CXXFLAGS=%CXXFLAGS% /Brepro /experimental:deterministic"
rem A path may have a space: each has quotes of its own, and the whole none.
set CXXFLAGS=%CXXFLAGS% "/pathmap:%SRC_DIR%=." "/pathmap:%PREFIX%=/host" "/pathmap:%BUILD_PREFIX%=/build"
set "LDFLAGS=%LDFLAGS% /Brepro"
rem Activated environments name another one.
set "CMAKE_GENERATOR=Ninja"

rem In two steps, because pip notes where it installed a folder or file from: that is no part of the package.
"%PYTHON%" -m pip wheel ".\%SAGE_PROJECT%" --no-deps --no-build-isolation --no-index -v -w dist ^
  -C cmake.source-dir="%SRC_DIR%\csrc\torch" ^
  -C wheel.install-dir=%SAGE_PACKAGE% ^
  -C cmake.define.SAGE_PACKAGE=%SAGE_PACKAGE% ^
  -C cmake.define.SAGE_TORCH_DIR="%SP_DIR%\torch" ^
  -C cmake.define.SAGE_TORCH_PREFIX="%LIBRARY_PREFIX%" ^
  -C cmake.define.SAGE_TORCH_RELEASE="%SAGE_TORCH_RELEASE%" ^
  -C cmake.define.SAGE_VERSION="%SAGE_VERSION%" ^
  -C cmake.define.SAGE_COMMIT="%SAGE_COMMIT%" ^
  -C cmake.define.SAGE_CUDA_VERSION="%SAGE_CUDA_VERSION%"
if errorlevel 1 exit /b 1
"%PYTHON%" -m pip install "%SAGE_PACKAGE%==%SAGE_VERSION%" --no-deps --no-compile --no-index --find-links dist
if errorlevel 1 exit /b 1
