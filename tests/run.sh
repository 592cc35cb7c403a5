#!/bin/bash
# run.sh - runs the tests, sums up, and ends with `N passed, N failed`.
#
#     tests/run.sh BUILD_DIR PROGRAM...
#
# PROGRAM by its name: test_* is cmocka and counts test by test; fuzz_* replays
# tests/corpus/NAME and counts once; vectors counts case by case. Then, each
# counted once: the include arrows and every manual page. A program that dies,
# hangs or leaves tests out has failed, by name. What a program printed is kept
# in BUILD_DIR/log and shown where something failed or was skipped.
set -u

# groff says nothing about a page that it understands whole.
if [ "$1" = -m ]; then
    said=$(groff -mandoc -Tutf8 -wall -z "$2" 2>&1)
    [ -z "$said" ] || { echo "$said"; exit 1; }
    exit 0
fi
build=$1
shift
limit_s=${TEST_LIMIT_S:-900}
logs=$build/log
passed=0 failed=0 skipped=0
failures=
mkdir -p "$logs"
export CMOCKA_MESSAGE_OUTPUT=TAP
unset CMOCKA_XML_FILE
# What a test allocates and never frees is a failure under the sanitizers.
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}

fail() # NAME REASON
{
    failed=$((failed + 1))
    failures+="  $1: $2"$'\n'
}

line() # NAME SECONDS TEXT
{
    printf '  %-44s %6s s  %s\n' "$1" "$2" "$3"
}

count() # PATTERN FILE
{
    grep -Ec "$1" "$2"
}

# Runs a command with its output in a log: sets `rc`, `log` and `took`.
run() # NAME COMMAND...
{
    local name=$1 start=$EPOCHREALTIME

    shift
    log=$logs/${name//\//_}.log
    timeout -k 10 "$limit_s" "$@" >"$log" 2>&1 </dev/null
    rc=$?
    took=$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN {
        printf "%.1f", b - a }')
}

died() # what the exit status of a failed program says
{
    case $1 in
    124) echo "still running after $limit_s s" ;;
    12[89] | 1[3-9][0-9]) echo "killed by signal $(($1 - 128))" ;;
    *) echo "exit status $1" ;;
    esac
}

run_cmocka() # PROGRAM
{
    local name=${1#"$build"/} ok bad skip plan

    run "$name" "$1"
    skip=$(count '^(not )?ok [0-9]+ # SKIP' "$log")
    ok=$(($(count '^ok [0-9]+' "$log") - $(count '^ok [0-9]+ # SKIP' "$log")))
    bad=$(grep -E '^not ok [0-9]+' "$log" | grep -vc '# SKIP')
    plan=$(awk -F'[.]+' '/^1[.][.][0-9]+$/ { n += $2 } END { print n + 0 }' \
        "$log")
    passed=$((passed + ok))
    skipped=$((skipped + skip))
    line "$name" "$took" "$ok passed$([ "$bad" -gt 0 ] &&
        echo ", $bad failed")$([ "$skip" -gt 0 ] && echo ", $skip skipped")"
    while read -r _ _ _ _ test; do
        fail "$name" "$test"
    done < <(grep -E '^not ok [0-9]+ - ' "$log" | grep -v '# SKIP')
    if [ "$plan" -eq 0 ] || [ $((ok + bad + skip)) -ne "$plan" ]; then
        fail "$name" "$((ok + bad + skip)) of $plan tests ended; $(died $rc)"
    elif [ $rc -ne 0 ] && [ "$bad" -eq 0 ]; then
        fail "$name" "tests passed, then $(died $rc)"
    elif [ "$bad" -eq 0 ] && [ "$skip" -eq 0 ]; then
        return
    fi
    # Passed tests aside, the last lines say why.
    grep -Ev '^ok [0-9]+ - |^1\.\.[0-9]+$|^# ok' "$log" | tail -n 60 |
        sed 's/^/    | /'
}

run_vectors() # NAME COMMAND...
{
    local name=$1 ok bad

    shift
    run "$name" "$@"
    ok=$(count '^ok +[^ ]' "$log")
    bad=$(count '^FAILED ' "$log")
    passed=$((passed + ok))
    line "$name" "$took" "$ok cases passed"
    while read -r _ test _; do
        fail "$name" "$test"
    done < <(grep '^FAILED ' "$log")
    if [ $rc -ne 0 ] && [ "$bad" -eq 0 ]; then
        fail "$name" "$(died $rc)"
        tail -n 20 "$log" | sed 's/^/    | /'
    elif [ "$ok" -eq 0 ] && [ "$bad" -eq 0 ]; then
        fail "$name" "ran no case"
    fi
}

run_once() # NAME COMMAND...
{
    run "$@"
    if [ $rc -eq 0 ]; then
        passed=$((passed + 1))
        line "$1" "$took" "$(tail -n 1 "$log" | cut -c 1-60)"
    else
        line "$1" "$took" failed
        fail "$1" "$(died $rc)"
        tail -n 40 "$log" | sed 's/^/    | /'
    fi
}

run_fuzz() # PROGRAM
{
    local corpus=tests/corpus/${1##*/fuzz_}

    if [ -n "$(ls "$corpus" 2>/dev/null)" ]; then
        run_once "${1#"$build"/}" "$1" "$corpus"
    else
        fail "${1#"$build"/}" "no corpus in $corpus"
    fi
}

for program; do
    case ${program##*/} in
    fuzz_*) run_fuzz "$program" ;;
    vectors)
        run_vectors "${program#"$build"/}" "$program" tests/cases
        # The cuda backend, kernels and all, on simulated devices; all groups
        # take minutes: make vectors-cuda.
        mkdir -p "$build/cases-cuda"
        ln -sfn "$PWD/tests/cases/text_bf16_sharded" "$build/cases-cuda/"
        run_vectors 'vectors, cuda' env LD_LIBRARY_PATH="$PWD/$build/cudasim" \
            NS_CUDASIM_TRACK=23 "$program" "$build/cases-cuda" ref fp32 cuda
        ;;
    *) run_cmocka "$program" ;;
    esac
done
# Of what is shipped: not of a build with sanitizers.
if [ -z "${SAN:-}" ]; then
    run_once 'Debian package' tests/tools/package.sh "$build"
    run_once 'docs/QUICKSTART.md' tests/tools/quickstart.sh "$build"
fi
run_once 'include arrows' "${MAKE:-make}" -s B="$build" layers
for page in */*.[1-8]; do
    run_once "$page" "$0" -m "$page"
done

if [ -n "$failures" ]; then
    printf '\nfailed:\n%s' "$failures"
fi
echo
if [ $skipped -gt 0 ]; then
    echo "$passed passed, $failed failed, $skipped skipped"
else
    echo "$passed passed, $failed failed"
fi
[ $failed -eq 0 ] && [ $passed -gt 0 ]
