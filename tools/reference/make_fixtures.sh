#!/bin/sh
# Makes fixtures/tiny from nothing but the binary and the packages of requirements.txt:
#   tools/reference/make_fixtures.sh target/release/omni-kev python3
set -eu
binary=$(realpath "$1")
python=$2
here=$(dirname "$(realpath "$0")")
out=$here/../../fixtures/tiny
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
"$binary" synth --geometry tiny --seed 0 --out "$work/checkpoint" > "$out/checkpoint.sha256"
"$binary" export --adapter "$work/checkpoint/adapter" --base "$work/checkpoint/base" --out "$work/export"
"$binary" corpus --questions 600 --state-words 300 --seed 0 --out "$out/corpus.jsonl"
"$binary" tokens "$work/export" --corpus "$out/corpus.jsonl" > "$work/tokens.jsonl"
"$python" "$here/capture.py" --checkpoint "$work/checkpoint" --export "$work/export" --corpus "$out/corpus.jsonl" \
    --tokens "$work/tokens.jsonl" --out "$work/reference.jsonl" --dtype float32 --device cpu
zstd -q -19 -f "$work/reference.jsonl" -o "$out/reference.jsonl.zst"
