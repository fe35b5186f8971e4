@echo on
rem Compiles the operators against PyTorch's headers, without importing PyTorch, and installs the Python package.
rem /Brepro: nothing of the time of the build in the binary.
set "CXXFLAGS=%CXXFLAGS% /Brepro"
set "LDFLAGS=%LDFLAGS% /Brepro"
rem Activated environments name another one.
set "CMAKE_GENERATOR=Ninja"

rem In two steps, because pip notes where it installed a folder or file from: that is no part of the package.
"%PYTHON%" -m pip wheel . --no-deps --no-build-isolation --no-index -v -w dist ^
  -C cmake.source-dir=csrc/torch ^
  -C wheel.install-dir=sageattention ^
  -C cmake.define.SAGE_TORCH_DIR="%SP_DIR%\torch" ^
  -C cmake.define.SAGE_VERSION="%SAGE_VERSION%" ^
  -C cmake.define.SAGE_COMMIT="%SAGE_COMMIT%" ^
  -C cmake.define.SAGE_CUDA_VERSION="%SAGE_CUDA_VERSION%"
if errorlevel 1 exit /b 1
"%PYTHON%" -m pip install "sageattention==%SAGE_VERSION%" --no-deps --no-compile --no-index --find-links dist
if errorlevel 1 exit /b 1
