#!/bin/sh
# Removes from the Python environment "$1" what serving does not load, and prints the size before and after: static libraries,
# headers, code for other compilers, profilers, disassemblers, CUDA's libraries that PyTorch is not linked with, and tests.
# Fails if PyTorch cannot be imported afterwards.
set -eu
cd "$1"/lib/python3*/site-packages
du --summarize --human-readable .
for name in nvidia torch triton; do
    if [ -d "$name" ]; then find "$name" -name '*.a' -delete; fi
done
rm -rf torch/include torch/bin/protoc*
rm -rf nvidia/*/include nvidia/nvshmem/lib/*.bc
for name in checkpoint cufftw cusolverMg nvblas nvperf_host nvperf_target pcsamplingutil; do
    rm -f nvidia/*/lib/lib$name.so*
done
rm -rf triton/backends/nvidia/lib/cupti* triton/backends/nvidia/bin/nvdisasm
for name in mpmath networkx numpy sympy; do
    if [ -d "$name" ]; then find "$name" -type d -name tests -prune -exec rm -r {} +; fi
done
du --summarize --human-readable .
"$1"/bin/python -c "import torch"
