#!/usr/bin/env bash
# Hammers what processes share (arena, ring) in a build with ThreadSanitizer (Linux, GCC). No Python in it: the interpreter's
# lock would order what must be in order without it. About half a minute; builds into build/sanitize-threads.
# Argument: seconds of each part.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-4}
work=build/sanitize-threads
cxx=${CXX:-g++}
reported=66  # TSan's exit status where it has reported something
mkdir -p "$work"

# Fences are not known to TSan (-Wno-tsan): what they order here are relaxed atomics, on which there are no races to report.
sources=(tests/native/hammer.cpp)
for part in arena ring copy checksum checksum_x86 cpu; do sources+=("kvtier/native/src/$part.cpp"); done
objects=()
for source in "${sources[@]}"; do
  object=$work/$(basename "$source" .cpp).o
  objects+=("$object")
  "$cxx" -std=c++20 -O1 -g -Wall -Wextra -Wno-tsan -Wno-maybe-uninitialized -fsanitize=thread -fno-omit-frame-pointer -c "$source" -o "$object"
done
"$cxx" -fsanitize=thread "${objects[@]}" -pthread -o "$work/hammer"

export TSAN_OPTIONS="halt_on_error=1 exitcode=$reported"
run=("$work/hammer")
# Address spaces that are randomised beyond what this TSan bears: without that, then.
if "${run[@]}" control 2>&1 | grep -q "unexpected memory mapping"; then run=(setarch "$(uname -m)" -R "${run[@]}"); fi

status=0
"${run[@]}" control >"$work/control.log" 2>&1 || status=$?
if [ "$status" != "$reported" ] || ! grep -q "WARNING: ThreadSanitizer: data race" "$work/control.log"; then
  cat "$work/control.log"
  echo "ThreadSanitizer did not report a race that is there (status $status)" >&2
  exit 1
fi
for part in arena ring processes; do "${run[@]}" "$part" "$seconds"; done
