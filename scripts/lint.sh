#!/bin/sh
# lint.sh - the checks that look at the whole tree: cppcheck, the manuals, the
# systemd units, and a count of lines that clang-format would move.
#
#     scripts/lint.sh CACHE FOLDER...
set -u

cache=$1
shift

# What is silenced for the whole tree, and why:
#   missingIncludeSystem      cppcheck needs no system headers, and says so
#   unusedStructMember        members are read in other files than they are in
#   normalCheckLevelMaxBranches  a remark about itself
#   invalidPointerCast        scratch is carved into arrays of other types
#   shiftTooManyBitsSigned    gcc defines it: the sign is shifted in
# and where it walks a loop zero times that runs at least once:
#   options.c                 one unit has scale 1, so that some unit divides
#   head_body.h               a table has parts, and a group has rows
cppcheck -q -j "$(nproc)" --std=c11 -I. --inline-suppr --error-exitcode=1 \
    --enable=warning,performance,portability \
    --suppress=missingIncludeSystem --suppress=unusedStructMember \
    --suppress=normalCheckLevelMaxBranches \
    --suppress=invalidPointerCast --suppress=shiftTooManyBitsSigned \
    --suppress=nullPointer:config/options.c \
    --suppress=invalidFunctionArg:kernels/cpu/head_body.h \
    --suppress=zerodiv:kernels/cpu/head_body.h \
    --cppcheck-build-dir="$cache" "$@" || exit 1

# A line of a manual that begins with a dot is a macro, or it is lost.
if command -v groff >/dev/null; then
    said=$(find "$@" -name '*.[158]' -exec groff -man -Tutf8 -ww -z {} + 2>&1)
    [ -z "$said" ] || { echo "$said"; exit 1; }
fi

scripts/units.sh "${cache%/lint}" || exit 1

# Layout is a matter of taste where it helps the reader, so this only counts.
if command -v clang-format >/dev/null; then
    find "$@" -name '*.[ch]' -exec clang-format --dry-run {} + 2>&1 |
        awk '/ warning: / { n++; split($1, at, ":"); if (!seen[at[1]]++) f++ }
             END { printf "clang-format would touch %d places in %d files\n",
                   n, f }'
fi
