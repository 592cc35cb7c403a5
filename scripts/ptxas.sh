#!/bin/sh
# ptxas.sh - a table of what each kernel takes, from what ptxas -v said.
#
#     scripts/ptxas.sh LOG...
#
# Each instance a line: registers, bytes of stack (local memory), bytes spilled.
# A kernel that spills or has a stack fails, and so does a log without kernels.
set -eu

cat "$@" | c++filt | awk '
    /Compiling entry function/ {
        name = $0
        sub(/^[^\x27]*\x27/, "", name)
        sub(/\x27 for .*/, "", name)
        sub(/^void /, "", name)
        sub(/\(.*/, "", name)
    }
    /bytes stack frame/ {
        stack = $1
        spilled = $5 + $9
    }
    /Used [0-9]+ registers/ {
        match($0, /Used [0-9]+/)
        registers = substr($0, RSTART + 5, RLENGTH - 5)
        bad = stack > 0 || spilled > 0
        failed += bad
        kernels++
        printf "%4d %6d %6d  %s%s\n", registers, stack, spilled, \
            name, bad ? "  <-- local memory" : "" | "sort -k4"
    }
    BEGIN { print "regs  stack  spill  kernel" }
    END {
        close("sort -k4")
        exit failed > 0 || kernels == 0
    }'
