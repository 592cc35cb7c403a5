#!/bin/sh
# demo.sh - the main job over real documents, printed for reading.
#
#     scripts/demo.sh BUILD_DIR
#
# Runs the model that the repository ships over held-out jobs with reference
# answers and over the documents of examples/ that fit its context. Where there
# is no such model it makes an untrained one and says so. Results stay in
# BUILD_DIR/demo.
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

# run NAME JOBS: results to OUT/NAME.results.jsonl, then printed.
run()
{
    results=$out/$1.results.jsonl
    status=0
    "$build/nightshift" run "$2" --model "$model" -o "$results" --progress ||
        status=$?
    # 1: some failed. Noise may open a tool call and never close it; a model
    # that was trained has no such excuse.
    if [ $status -ne 0 ] && { [ $status -ne 1 ] || [ -n "$trained" ]; }; then
        exit $status
    fi
    # Reference answers stand in a file beside the jobs: demo-jobs*.jsonl has
    # demo-answers*.jsonl.
    answers=$(echo "$2" | sed 's/demo-jobs/demo-answers/')
    if [ "$answers" != "$2" ] && [ -f "$answers" ]; then
        "$build/nightshift" show "$results" --jobs "$2" --answers "$answers"
    else
        "$build/nightshift" show "$results" --jobs "$2"
    fi
}

# Of the documents, those that the model's context holds.
jobs=$out/documents.jsonl
"$build/nightshift" validate examples/documents.jsonl --model "$model" \
    >"$out/validate.log" || true
sed "$(sed -n 's/^[^:]*:\([0-9]*\): over_context:.*/\1d;/p' \
    "$out/validate.log" | tr -d '\n')" examples/documents.jsonl >"$jobs"
all=$(wc -l <examples/documents.jsonl)
fit=$(wc -l <"$jobs")

if [ -n "$trained" ]; then
    for held_out in examples/demo-jobs*.jsonl; do
        name=${held_out#examples/}
        run "${name%.jsonl}" "$held_out"
    done
fi
if [ "$fit" -gt 0 ]; then
    run documents "$jobs"
fi
[ "$fit" -eq "$all" ] ||
    echo "$((all - fit)) of $all documents are longer than the model's context."
[ -n "$trained" ] || echo "This ran on an untrained checkpoint, made on the" \
    "spot: the work is real, the text is noise."
