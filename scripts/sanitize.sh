#!/usr/bin/env bash
# Runs the native tests against a build of kvtier._native with AddressSanitizer and UBSan (Linux, GCC).
# Arguments go to pytest. Needs `make setup`; builds into build/sanitize and leaves .venv alone.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$PWD/.venv/bin/python
work=$PWD/build/sanitize
cxx=${CXX:-g++}

# A light environment beside .venv: its own kvtier, everything else from there. What .venv's .pth files name is
# listed by the interpreter itself, since .pth files in a folder added by a .pth are not read; so .venv's
# editable kvtier does not leak in.
if [ ! -x "$work/venv/bin/python" ]; then
  "$python" -m venv --without-pip "$work/venv"
fi
site=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
"$python" -c 'import sys; print(*(p for p in sys.path if p.endswith("site-packages")), sep="\n")' > "$site/outer.pth"

PATH="$PWD/.venv/bin:$PATH" CXX=$cxx "$python" -m pip --python "$work/venv/bin/python" install --quiet \
  --disable-pip-version-check --no-deps --no-build-isolation --editable . \
  -C build-dir="$work/cmake" -C install.strip=false -C cmake.define.KVTIER_SANITIZE=ON

# The interpreter is not instrumented, so the runtimes come first; libstdc++ too, for ASan to find __cxa_throw.
preload=$("$cxx" -print-file-name=libasan.so):$("$cxx" -print-file-name=libubsan.so)
preload=$preload:$("$cxx" -print-file-name=libstdc++.so.6)
export ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1:strict_string_checks=1:allocator_may_return_null=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export PYTHONMALLOC=malloc  # so that ASan sees the edges of small Python objects

run() { LD_PRELOAD=$preload "$work/venv/bin/python" "$@"; }

run -c 'import kvtier._native as n; assert n.SANITIZED, f"{n.__file__} is not the sanitized module"; print(n.__file__)'
run -m pytest -q -p no:cacheprovider --capture=sys tests/native "$@"  # a report must not die with the captured stderr
