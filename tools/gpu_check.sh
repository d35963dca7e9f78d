#!/usr/bin/env bash
# Build, verify and time the CUDA kernels on one GPU: tools/gpu_check.sh [OUTPUT DIRECTORY]
# Needs a CUDA build of torch (>= 2.10), nvcc and g++. Under four minutes. Exit code 0: everything agreed.
# Not yet run on a GPU: until it has been, the CUDA kernels are tested under the emulator only (see docs/kernels.md).
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-build/gpu_check}
python=${PYTHON:-python3}
mkdir -p "$out"
arch=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
echo "building for sm_$arch"
MEGASAO_BUILD=1 MEGASAO_CUDA=1 MEGASAO_CUDA_ARCH="$arch" timeout 150 "$python" setup.py build_ext --inplace
PYTHONPATH="$PWD" timeout 120 "$python" benchmarks/gpu.py --json "$out/gpu.json" | tee "$out/gpu.txt"
if command -v compute-sanitizer >/dev/null; then
    # What the emulator cannot see: races and missing barriers.
    for tool in memcheck racecheck; do
        PYTHONPATH="$PWD" timeout 60 compute-sanitizer --tool "$tool" --error-exitcode 1 \
            "$python" benchmarks/gpu.py --verify-only --tokens 20000 | tail -n 3
    done
fi
