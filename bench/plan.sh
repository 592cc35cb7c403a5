#!/bin/sh
# plan.sh - what `nightshift plan` says, against what then happens.
#
#     bench/plan.sh BUILD_DIR
#
# Three rounds of the demo jobs are run as history, thirty others are planned
# with it and then run, in each mode. Plans, which measure the machine, and runs
# take turns; what is compared is the minima, since whatever else the machine
# does adds to both but never at once. Ends with what the card simulator says
# and one line of ratios, predicted over measured; the status is 1 where one is
# off by more than a fifth.
set -eu

build=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 - "$work" <<'PY'
import json, sys
# Not those with a mode or a picture of their own.
jobs = [job for job in map(json.loads, open("examples/demo-jobs.jsonl"))
        if "nightshift" not in job["body"] and all(
            isinstance(message["content"], str)
            for message in job["body"]["messages"])]
for name, rounds in (("history", range(3)), ("jobs", range(3, 33))):
    with open(f"{sys.argv[1]}/{name}.jsonl", "w") as out:
        for seed in rounds:
            for job in jobs:
                body = dict(job["body"], seed=seed)
                out.write(json.dumps(dict(job, body=body,
                          custom_id=f"{job['custom_id']}-{seed}")) + "\n")
PY
rounds=5
# Seconds that a command takes.
took() {
    begin=$(date +%s.%N)
    "$@"
    echo "$begin $(date +%s.%N)" | awk '{ print $2 - $1 }'
}
least() {
    sort -n "$1" | head -1
}
# What a run takes that runs nothing is no job's.
: >"$work/none.jsonl"
nothing() {
    "$build/nightshift" run "$work/none.jsonl" -o "$work/none" -q || true
}
for round in $(seq $rounds); do
    took nothing >>"$work/idle"
done
line=
for mode in diffusion hybrid ar; do
    "$build/nightshift" run "$work/history.jsonl" -o "$work/history" -q \
        --restart --mode $mode
    for round in $(seq $rounds); do
        "$build/nightshift" plan "$work/jobs.jsonl" --set engine.mode=$mode \
            --history "$work/history" | awk '
            $1 == "time" { print $3 ~ /^min/ ? $2 * 60 : $2 }' \
            >>"$work/$mode-planned"
        took "$build/nightshift" run "$work/jobs.jsonl" -o "$work/out" -q \
            --restart --mode $mode >>"$work/$mode-ran"
    done
    ratio=$(echo "$(least "$work/$mode-planned") $(least "$work/$mode-ran")" \
        "$(least "$work/idle")" | awk '
        { printf "%.2f %.1f %.1f", $1 / ($2 - $3), $1, $2 - $3 }')
    set -- $ratio
    echo "  $mode: planned $2 s, ran $3 s"
    line="$line plan-$mode $1"
done
"$build/bench/card" --fp8 --jobs 200000 --hours 6
echo "a million jobs:"
"$build/bench/card" --fp8 --jobs 1000000 --hours 30 --policy ours
echo "ratio:$line"
echo "$line" | awk '{ for (i = 2; i <= NF; i += 2)
    off += $i < 0.8 || $i > 1.2; exit off > 0 }'
