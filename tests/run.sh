#!/usr/bin/env bash
# tests/run.sh [pytest arguments]: sets everything up on a bare machine and runs the whole suite, or what the arguments
# select. Tests of times (`-m timing`) are skipped where other processes have the cores; .ci/run has them in a part of
# their own, after the rest (`-m "not timing"`). Uses the active virtual environment if ms_kungfu is installed in it, else .venv in the checkout.
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
"$root/install-kungfu.sh" --venv "$venv" --extras examples,test "${apt[@]}" >&2

cd -- "$root"
export VIRTUAL_ENV=$venv PATH="$venv/bin:$PATH"
exec "$venv/bin/python" -m pytest "$@"
