@echo on
rem Compiles the operators against PyTorch's headers, without importing PyTorch, and installs the Python package.
set "CXXFLAGS=%CXXFLAGS% /Brepro"
set "LDFLAGS=%LDFLAGS% /Brepro"

"%PYTHON%" -m pip install . --no-deps --no-build-isolation --no-compile -v ^
  -C cmake.source-dir=csrc/torch ^
  -C wheel.install-dir=sageattention ^
  -C cmake.define.SAGE_TORCH_DIR="%SP_DIR%\torch" ^
  -C cmake.define.SAGE_VERSION="%SAGE_VERSION%" ^
  -C cmake.define.SAGE_CUDA_VERSION="%SAGE_CUDA_VERSION%"
if errorlevel 1 exit /b 1

rem Where pip was run is not part of the package.
del /q "%SP_DIR%\sageattention-%SAGE_VERSION%.dist-info\direct_url.json" 2>nul
exit /b 0
