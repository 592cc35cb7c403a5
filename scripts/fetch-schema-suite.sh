#!/bin/sh
# fetch-schema-suite.sh - JSON-Schema-Test-Suite, as tests/engine reads it.
#
#     scripts/fetch-schema-suite.sh [DIR]      default: build/schema-suite
#
# The suite has no package of its own; the source package of Python's
# jsonschema carries it whole. Only its files are taken, none is run. Does
# nothing when DIR has them already; DIR holds half of them at no time.
set -eu

package=jsonschema==4.23.0
sha256=d71497fef26351a33265337fa77ffeb82423f3ea21283cd9467bb03999266bc4
dir=${1:-build/schema-suite}

if [ -d "$dir/draft2020-12" ]; then
    exit 0
fi
mkdir -p "$dir"
work=$(mktemp -d "$dir/pip.XXXXXX")
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
# pip reads a source package's own description, so it builds that in passing.
"$work/venv/bin/pip" -q --disable-pip-version-check download --no-deps \
    --no-binary=:all: -d "$work" "$package"
got=$(echo "$work"/jsonschema-*.tar.gz)
if [ "$(sha256sum <"$got" | cut -d ' ' -f 1)" != $sha256 ]; then
    echo "fetch-schema-suite: $got is not the file we know" >&2
    exit 1
fi
tar -xzf "$got" -C "$work" --strip-components=3 --wildcards \
    '*/json/tests/draft2020-12'
mv "$work/draft2020-12" "$dir"
