#!/bin/sh
# Fuzzes the readers of outside files.
#   tools/fuzz/run.sh [SECONDS]         each target from tools/fuzz/corpus, default 60 s; leaves there
#                                       the fewest files that reach the same edges, new ones included
#   tools/fuzz/run.sh --check SECONDS   the same, and leaves the corpus as it is
# tests/unit/fuzz_corpus_test.cpp runs the corpus. A crash ends the script; its input stays in
# build-fuzz/crashes.
set -eu
keep=true
if [ "${1:-}" = --check ]; then
  keep=false
  shift
fi
seconds=${1:-60}
case $seconds in
  '' | *[!0-9]*) echo "usage: tools/fuzz/run.sh [--check] [SECONDS]; $seconds given" >&2; exit 2 ;;
esac
root=$(cd "$(dirname "$0")/../.." && pwd)
build=$root/build-fuzz
compiler=$(command -v clang++ || command -v clang++-14) || {
  echo "tools/fuzz/run.sh: clang++ is not installed (Debian: clang-14, libclang-rt-14-dev)" >&2
  exit 2
}
# --fresh: a cache of another compiler would drop the options given here.
cmake --fresh -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_COMPILER="$compiler" \
  -DRAFTER_FUZZ=ON >/dev/null
ninja -C "$build" >/dev/null
mkdir -p "$build/crashes"
for target in npy safetensors device; do
  corpus=$root/tools/fuzz/corpus/$target
  found=$build/found/$target
  minimised=$build/minimised/$target
  rm -rf "$found" "$minimised"
  mkdir -p "$corpus" "$found" "$minimised"
  echo "== $target, $seconds s"
  "$build/${target}_fuzz" -max_total_time="$seconds" -max_len=4096 -timeout=10 -rss_limit_mb=2048 \
    -artifact_prefix="$build/crashes/$target-" -print_final_stats=1 -verbosity=0 \
    -dict="$root/tools/fuzz/$target.dict" "$found" "$corpus"
  $keep || continue
  "$build/${target}_fuzz" -merge=1 -use_counters=0 -verbosity=0 "$minimised" "$corpus" "$found"
  rm -rf "$corpus"
  mv "$minimised" "$corpus"
  echo "   corpus: $(find "$corpus" -type f | wc -l) files, $(du -sb "$corpus" | cut -f1) bytes"
done
