#!/bin/sh
# demo.sh - what the model does, printed for reading.
#
#     scripts/demo.sh BUILD_DIR
#
# Runs the model that the repository ships over held-out jobs and prints its
# answers above the references. Where there is no such model it makes an
# untrained one, runs the documents of examples/ and says so. Results stay in
# BUILD_DIR/demo, the pictures that were looked at beside them.
set -eu

build=$1
model=models/demo
out=$build/demo
rm -rf "$out"
mkdir -p "$out"
trained=yes
if [ ! -f "$model/config.json" ]; then
    trained=
    model=$out/untrained
    "$build/tests/tools/make_checkpoint" demo "$model"
fi

# run NAME JOBS [ANSWERS]: results to OUT/NAME.results.jsonl, then printed, the totals
# last. Pictures lie below examples/.
run()
{
    results=$out/$1.results.jsonl
    log=$out/$1.log
    echo 0 >"$out/status"
    { "$build/nightshift" run "$2" --model "$model" -o "$results" --progress \
        --set images.roots=examples 2>&1 || echo $? >"$out/status"; } |
        tee "$log" >&2
    status=$(cat "$out/status")
    # 1: some failed. Noise may open a tool call and never close it; a model
    # that was trained has no such excuse.
    if [ "$status" -ne 0 ] && { [ "$status" -ne 1 ] || [ -n "$trained" ]; }; then
        exit "$status"
    fi
    "$build/nightshift" show "$results" --jobs "$2" ${3:+--answers "$3"}
    tr '\r' '\n' <"$log" | tail -n 1
}

if [ -n "$trained" ]; then
    cp -r examples/pictures "$out/"
    run demo-jobs examples/demo-jobs.jsonl examples/demo-answers.jsonl
    exit
fi

# Of the documents, those that the model's context holds.
jobs=$out/documents.jsonl
"$build/nightshift" validate examples/documents.jsonl --model "$model" \
    >"$out/validate.log" || true
sed "$(sed -n 's/^[^:]*:\([0-9]*\): over_context:.*/\1d;/p' \
    "$out/validate.log" | tr -d '\n')" examples/documents.jsonl >"$jobs"
run documents "$jobs"
echo "Of $(wc -l <examples/documents.jsonl) documents, the model's context" \
    "holds $(wc -l <"$jobs"). It is untrained, made on the spot: the work is" \
    "real, the text is noise."
