#!/bin/bash
# quickstart.sh - runs every block of docs/QUICKSTART.md, as a reader would.
#
#     tests/tools/quickstart.sh BUILD_DIR
#
# In a copy of what the page needs, in one shell, as a user without rights where
# we are root, on ports of its own. What the blocks print is checked for what
# the page says that they show.
set -eu

build=$1
work=$(mktemp -d /tmp/nightshift-quickstart-XXXXXX)
trap 'rm -rf "$work"' EXIT
mkdir "$work/build" "$work/models"
cp "$build/nightshift" "$build/nightshiftd" "$work/build"
cp -r models/demo "$work/models"
cp -r examples scripts "$work"
cp -r build/kafka "$work/build/kafka"

# What the reader pastes: all that stands between ```sh and ```.
awk '/^```sh$/ { inside = 1; next } /^```$/ { inside = 0 } inside' \
    docs/QUICKSTART.md >"$work/blocks"
[ "$(grep -c . "$work/blocks")" -gt 50 ] || exit 1
for port in 9464 54321 19092 19093; do
    free=$(python3 -c 'import socket; s = socket.socket()
s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    sed -i "s/\b$port\b/$free/g" "$work/blocks"
done

# Not before it was said what failed are its servers ended.
cat >"$work/run" <<'END'
set -eEu
cd "$(dirname "$0")"
export HOME=$PWD TMPDIR=$PWD LC_ALL=C.UTF-8
trap 'echo "quickstart: failed: $BASH_COMMAND" >&2; tail -n 5 *.log >&2' ERR
trap 'kill $(jobs -p) 2>/dev/null || true
      [ ! -e pgdata/postmaster.pid ] || kill -QUIT $(head -n 1 pgdata/postmaster.pid)
      wait' EXIT
. ./blocks
END
as=
if [ "$(id -u)" = 0 ]; then
    chown -R postgres "$work"
    as="setpriv --reuid=postgres --regid=postgres --clear-groups"
fi
# shellcheck disable=SC2086 # words
timeout 300 $as bash "$work/run" >"$work/out" 2>"$work/err" </dev/null || {
    cat "$work/out" "$work/err"
    exit 1
}
expect()
{
    grep -Eq "$1" "$work/out" || {
        echo "quickstart: nothing said: $1"
        cat "$work/out" "$work/err"
        exit 1
    }
}
expect '6 jobs, 0 bad'
expect '^6 spool/out/night-1.jsonl$'
expect 'jobs_total\{status="ok"\} 6$'
expect '\(6 rows\)'
expect '^6$'
echo "$(grep -c . "$work/blocks") lines pasted, all did what the page says"
