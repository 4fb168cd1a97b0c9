#!/usr/bin/env bash
# Train LeNet on a cluster that changes 1 -> 2 -> 4 -> 1 during training. The script first installs missing packages. It
# passes its arguments to train.py. The results are in this folder: out/training.png, out/training.jsonl, and the
# workers' logs in logs/. At the end, the script proves that the training used each sample once per epoch.
set -euo pipefail

export PATH="${PATH:+$PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
root=$(cd -- "$here/../.." && pwd -P)

# Check for the other packages without importing them, because an import takes two seconds.
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
# Workers write to pipes, so they can't get the terminal's width. kungfu-run puts a worker's name before each line.
if [ -t 2 ]; then
  PROGRESS_BAR_WIDTH=$(python -c 'import os; print(max(40, (os.get_terminal_size(2).columns or 80) - 27))')
  export PROGRESS_BAR_WIDTH
fi

# Workers record their samples in this folder. If you pass --ledger, it comes later on the command line and applies.
ledger=$here/logs/ledger resume=
for ((i = 1; i <= $#; i++)); do
  case ${!i} in
    -h | --help)
      printf 'run-elastic.sh [--chaos] [ARGUMENT ...]: --chaos kills workers and resizes at random; arguments go to train.py:\n\n'
      exec python "$here/arguments.py" --help
      ;;
    --ledger) next=$((i + 1)) && ledger=${!next:-} ;;
    --ledger=*) ledger=${!i#--ledger=} ;;
    --resume) resume=1 ;; # continue an earlier run
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
# Check the arguments before the last run's ledger is removed. This line ends the script if they are invalid.
shards=$(python "$here/arguments.py" "${words[@]}")
[ "$resume" ] || rm -rf "$here/logs/ledger"

# If the first argument is --chaos, kill workers and resize the cluster at random, for two minutes (or CHAOS_SECONDS).
# The time isn't sufficient for all epochs. Training ends a moment after the last kill or resize.
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
trap : INT # a terminal also sends SIGINT to kungfu-run
status=0
while wait "$job" || status=$? && kill -0 "$job" 2>/dev/null; do status=0; done
[ "$status" = 0 ] || exit "$status"
python -m ms_kungfu.dataset.audit "$ledger"
