#!/bin/sh
# fuzz.sh - libFuzzer over each target, from its corpus.
#
#     scripts/fuzz.sh SECONDS TARGET...
#
# New inputs stay beside the target; one that breaks it is written there as
# crash-*, and belongs into tests/corpus with the fix. Ends with a count.
set -u

seconds=$1
shift
broken=0
for target; do
    name=${target##*/fuzz_}
    found=${target%/*}/$name.found
    mkdir -p "$found"
    echo "== $name, $seconds s"
    if ! "$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 \
        -max_len=65536 -print_final_stats=1 -artifact_prefix="$found/crash-" \
        "$found" "tests/corpus/$name" >"$found.log" 2>&1; then
        broken=$((broken + 1))
        tail -n 40 "$found.log"
    fi
    grep -E 'number_of_executed_units|new_units_added' "$found.log"
done
echo "$# fuzzed, $broken broken"
[ "$broken" -eq 0 ]
