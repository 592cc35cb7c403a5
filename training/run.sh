#!/bin/sh
# Starts a training script in the background:  run.sh PYTHON SCRIPT WORK   (log: WORK/SCRIPT.out, process id: WORK/pid)
here=$(dirname "$0")
export MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=268435456
export GOMP_SPINCOUNT=2000 PYTHONDONTWRITEBYTECODE=1
setsid nohup nice -n "${NICE:-19}" "$1" "$here/$2" "$3" >>"$3/$2.out" 2>&1 &
echo $! >"$3/pid"
