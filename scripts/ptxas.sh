#!/bin/sh
# ptxas.sh - a table of what each kernel takes, from what ptxas -v said.
#
#     scripts/ptxas.sh HOT[,HOT...] LOG...
#
# Kernels by the start of their names; each instance a line: registers,
# barriers, bytes of stack (local memory), bytes spilled. A hot kernel that
# spills or has a stack fails, and so does one that is not there: a list that
# nothing answers to checks nothing.
set -eu

hot=$1
shift
cat "$@" | c++filt | awk -v hot="$hot" '
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
        kernel = name
        sub(/<.*/, "", kernel)
        seen[kernel] = 1
        n = split(hot, list, ",")
        mark = ""
        for (i = 1; i <= n; i++)
            if (kernel == list[i])
                mark = "hot"
        bad = mark == "hot" && (stack > 0 || spilled > 0)
        failed += bad
        printf "%4d %6d %6d  %-4s %s%s\n", registers, stack, spilled, mark, \
            name, bad ? "  <-- local memory" : "" | "sort -k5"
    }
    BEGIN { print "regs  stack  spill        kernel" }
    END {
        close("sort -k5")
        n = split(hot, list, ",")
        for (i = 1; i <= n; i++)
            if (!(list[i] in seen)) {
                print "ptxas: no kernel is called " list[i] > "/dev/stderr"
                failed++
            }
        exit failed > 0
    }'
