#!/usr/bin/env bash
# LeNet on a cluster that goes 1 -> 2 -> 4 -> 1 while it trains. Installs first where needed; arguments go to train.py.
# Results: out/training.png, out/training.jsonl and the workers' logs in logs/, beside this file; last, the proof that each
# sample was trained once an epoch.
set -euo pipefail

export PATH="${PATH:+$PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
root=$(cd -- "$here/../.." && pwd -P)

# Looks for the others without loading them, which takes two seconds.
ready() {
  command -v kungfu-run >/dev/null && python -c 'import importlib.util, ms_kungfu._core
assert all(map(importlib.util.find_spec, ("matplotlib", "sklearn", "tqdm")))' 2>/dev/null
}

if ! ready; then
  export VIRTUAL_ENV="${VIRTUAL_ENV:-$root/.venv}"
  export PATH="$VIRTUAL_ENV/bin:$PATH"
  if ! ready; then
    apt=()
    if [ "$(id -u)" = 0 ]; then apt=(--apt); fi
    "$root/install-kungfu.sh" --venv "$VIRTUAL_ENV" --extras examples "${apt[@]}"
  fi
fi

port=$(python - <<'PYTHON'
import socket

for port in (9100, 0):
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the config server does
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            continue
        print(s.getsockname()[1])
        break
PYTHON
)
# Workers write into pipes and can't see the terminal themselves; kungfu-run puts a worker's name before each line.
if [ -t 2 ]; then
  PROGRESS_BAR_WIDTH=$(python -c 'import os; print(max(40, (os.get_terminal_size(2).columns or 80) - 27))')
  export PROGRESS_BAR_WIDTH
fi

# What is trained goes on record there; a --ledger of your own comes later on the command line and counts.
ledger=$here/logs/ledger resume=
for ((i = 1; i <= $#; i++)); do
  case ${!i} in
    -h | --help)
      printf 'run-elastic.sh [--chaos] [ARGUMENT ...]: --chaos kills workers and resizes at random; arguments go to train.py:\n\n'
      exec python "$here/arguments.py" --help
      ;;
    --ledger) next=$((i + 1)) && ledger=${!next:-} ;;
    --ledger=*) ledger=${!i#--ledger=} ;;
    --resume) resume=1 ;; # goes on with what an earlier run began
  esac
done
words=("$@")
[ "${1:-}" != --chaos ] || words=("${@:2}")
mkdir -p "$here/logs"
exec {lock}>"$here/logs/lock"
if ! flock -n "$lock"; then
  echo "run-elastic.sh: another run writes into logs/ of this folder; let it end, or copy the folder" >&2
  exit 1
fi
# Before the last run's proof is removed: it ends this where it has a complaint.
shards=$(python "$here/arguments.py" "${words[@]}")
[ "$resume" ] || rm -rf "$here/logs/ledger"

# --chaos, as the first argument: workers are killed and the cluster is resized at random, for two minutes (or
# CHAOS_SECONDS). There are more epochs than fit into the time; training ends when it has been left alone for a moment.
if [ "${1:-}" = --chaos ]; then
  shift
  seconds=${CHAOS_SECONDS:-120}
  end=$(($(date +%s) + seconds + 15))
  KUNGFU_LEDGER_DIR=$ledger exec python -m ms_kungfu.chaos -for "$seconds" -- -logdir "$here/logs" -np 2 \
    python "$here/train.py" --ledger "$ledger" --schedule none --epochs $((seconds * 3)) --until "$end" "$@"
fi

kungfu-run -q -logdir "$here/logs" -np 1 -w -builtin-config-port "$port" -config-server "http://127.0.0.1:$port/config" \
  python "$here/train.py" --ledger "$here/logs/ledger" --shards "$shards" "$@" <&0 &
job=$!
trap 'kill -TERM "$job"' TERM HUP
trap : INT # a terminal sends it to kungfu-run too
status=0
while wait "$job" || status=$? && kill -0 "$job" 2>/dev/null; do status=0; done
[ "$status" = 0 ] || exit "$status"
python -m ms_kungfu.dataset.audit "$ledger"
