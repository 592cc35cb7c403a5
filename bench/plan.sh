#!/bin/sh
# plan.sh - what `nightshift plan` says, against what then happens.
#
#     bench/plan.sh BUILD_DIR
#
# Three rounds of the demo jobs are run as history, thirty others are planned
# with it and then run, in each mode. Ends with one line of ratios, predicted
# over measured, and one of what the card simulator says.
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
# What a run takes that runs nothing is no job's.
: >"$work/none.jsonl"
begin=$(date +%s.%N)
"$build/nightshift" run "$work/none.jsonl" -o "$work/none" -q || true
idle=$(echo "$begin $(date +%s.%N)" | awk '{ print $2 - $1 }')
line=
for mode in diffusion hybrid ar; do
    "$build/nightshift" run "$work/history.jsonl" -o "$work/$mode-history" \
        -q --mode $mode
    "$build/nightshift" plan "$work/jobs.jsonl" --set engine.mode=$mode \
        --history "$work/$mode-history" >"$work/plan"
    begin=$(date +%s.%N)
    "$build/nightshift" run "$work/jobs.jsonl" -o "$work/$mode-out" -q \
        --mode $mode
    end=$(date +%s.%N)
    line="$line $(awk -v mode=$mode -v begin="$begin" -v end="$end" -v idle="$idle" '
        $1 == "time" { p = $2; if ($3 ~ /^min/) p *= 60
                       printf "plan-%s %.2f", mode, p / (end - begin - idle) }' "$work/plan")"
done
"$build/bench/card" --fp8 --jobs 200000 --hours 6
echo "a million jobs:"
"$build/bench/card" --fp8 --jobs 1000000 --hours 30 --policy ours
echo "ratio:$line"
