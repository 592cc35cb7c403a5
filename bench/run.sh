#!/bin/sh
# run.sh - the peer's Python environment, made once, the demo model's vectors
# made again, and the comparisons.
#
#     bench/run.sh BUILD_DIR
set -eu

build=$1
venv=$build/bench/venv
if ! cmp -s bench/requirements.txt "$venv/ready"; then
    echo "bench: installing torch and transformers (5 GB) into $venv"
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q -r bench/requirements.txt
    cp bench/requirements.txt "$venv/ready"
fi
# Page faults are dear: without these, transformers spends half of its sampler
# in the kernel. Ours takes its memory before the first pass and needs none.
export MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184
export MALLOC_TOP_PAD_=268435456
export HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
status=0
"$venv/bin/python" training/vectors.py models/demo examples \
    "$build/bench/demo-transformers.jsonl" examples/demo-transformers.jsonl ||
    status=1
"$venv/bin/python" bench/images.py "$build" || status=1
"$venv/bin/python" bench/compare.py "$build" || status=1
"$venv/bin/python" bench/curve.py "$build" "$build/bench/speed.svg" --short || status=1
exit $status
