#!/bin/sh
# fetch-cuda.sh - says where nvcc 13 is; fetches it where there is none.
#
#     scripts/fetch-cuda.sh [DIR]              default: build/cuda-toolkit
#
# Prints the path of an nvcc 13: the system's, $CUDA_HOME's, or one installed
# under DIR from PyPI by name and version (250 MB, a minute the first time).
# What it builds needs none of it: the runtime is linked in.
set -eu

version='13.0.*'
dir=${1:-build/cuda-toolkit}

is_13()
{
    "$1" --version 2>/dev/null | grep -q 'release 13\.'
}

for nvcc in "${CUDA_HOME:+$CUDA_HOME/bin/nvcc}" \
    "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc \
    "$dir/nvidia/cu13/bin/nvcc"; do
    if [ -n "$nvcc" ] && is_13 "$nvcc"; then
        echo "$nvcc"
        exit 0
    fi
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "fetch-cuda: installing nvcc into $dir" >&2
python3 -m venv "$work/venv"
"$work/venv/bin/pip" -q --disable-pip-version-check install --no-compile \
    --upgrade --target "$dir" "nvidia-cuda-nvcc==$version" \
    "nvidia-nvvm==$version" "nvidia-cuda-crt==$version" \
    "nvidia-cuda-cccl==$version" "nvidia-cuda-runtime==$version" >&2
if ! is_13 "$dir/nvidia/cu13/bin/nvcc"; then
    echo "fetch-cuda: $dir has no nvcc that runs" >&2
    exit 1
fi
echo "$dir/nvidia/cu13/bin/nvcc"
