#!/usr/bin/env bash
# tests/run.sh [--all] [pytest arguments]: sets everything up on a bare machine and runs the tests.
#
#   tests/run.sh             all that can break in a user's hands
#   tests/run.sh --all       the rest, too: long jobs and sweeps, compilations for each device, limits on time
#   tests/run.sh ARGUMENTS   what pytest's arguments select (README.md beside this file)
#
# Without arguments one test more than there are cores runs at a time, since many of them wait; then those that need the
# machine for themselves, one after the other. Uses the active virtual environment if ms_kungfu is installed in it, else .venv in the checkout.
# TESTS_EXTRAS: more of the package's extras to install there.
set -euo pipefail

export PATH="${PATH:+$PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
if [ -n "${VIRTUAL_ENV:-}" ] &&
  "$VIRTUAL_ENV/bin/python" -I -c 'from importlib.metadata import version; version("ms-kungfu")' 2>/dev/null; then
  venv=$VIRTUAL_ENV
fi
apt=()
if [ "$(id -u)" = 0 ]; then apt=(--apt); fi
# To stderr: standard output is pytest's.
"$root/install-kungfu.sh" --venv "$venv" --extras "examples,test${TESTS_EXTRAS:+,$TESTS_EXTRAS}" "${apt[@]}" >&2

cd -- "$root"
export VIRTUAL_ENV=$venv PATH="$venv/bin:$PATH"
# Else each of the thousands of processes would compile this package anew, which doubles a launcher's start.
unset PYTHONDONTWRITEBYTECODE
if command -v ccache >/dev/null; then export CMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER-ccache}; fi
pytest=("$venv/bin/python" -m pytest)
all=() marks="not timing and not long and not site"
if [ "${1:-}" = --all ]; then all=(--all) marks="not timing" && shift; fi
if [ $# -gt 0 ]; then exec "${pytest[@]}" "${all[@]}" "$@"; fi

cores=$(nproc)
failed=0
part() { # NAME PYTEST ARGUMENTS...
  local name=$1
  shift
  printf '\n=== %s\n' "$name"
  # 5: nothing is selected
  local status=0
  "${pytest[@]}" "${all[@]}" -p no:cacheprovider --durations=20 --durations-min=1 "$@" || status=$?
  case $status in
    0 | 5) ;; # 5: nothing is selected
    1) [ "$failed" -gt 0 ] || failed=1 ;;
    *) failed=$status ;; # more than tests that fail
  esac
}
part "side by side" -n "$((cores < 8 ? cores + 1 : 8))" --dist load --maxschedchunk 1 -m "$marks and not alone"
# These files alone: to collect all of them takes as long as half of these tests.
mapfile -t alone < <(grep -rl --include='test_*.py' 'mark\.alone' tests)
part "one at a time" -m "$marks and alone" "${alone[@]}"
if [ ${#all[@]} -gt 0 ]; then part "timing" -m timing; fi
exit $failed
