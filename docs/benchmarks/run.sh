#!/usr/bin/env bash
# docs/benchmarks/run.sh [DIR]: measures everything anew and writes it beside this file, or into DIR. Needs an idle machine,
# about a quarter of an hour, and the peers: pip install "ms_kungfu[bench]".
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
cd -- "$here/../.."
exec "${PYTHON:-python}" -m benchmarks all --out "${1:-docs/benchmarks/results}"
