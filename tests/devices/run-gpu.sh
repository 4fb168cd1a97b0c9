#!/usr/bin/env bash
# tests/devices/run-gpu.sh [--stand-ins FOLDER]: the device layer on a real NVIDIA GPU, with real CUDA and, where it is found,
# real NCCL. One line for each part at the end; exits with 1 if a part failed. docs/devices.md keeps what it found.
#
# Needs Python with NumPy, nvcc and a C++17 compiler, and either ms_kungfu installed for this Python ($PYTHON, python3) or
# CMake and pybind11 to build its runtime here. No MindSpore, no launcher, no network. NCCL: what the loader finds, the
# Python package nvidia-nccl-cu*, or KUNGFU_DEVICE_ENGINE_LIBRARY. With --stand-ins the same programs run over those, to
# see that this script works: no compiling with nvcc, no sanitizer, small sizes.
# shellcheck disable=SC2329  # part() calls functions by name
set -uo pipefail

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." || exit 1
root=$PWD
python=${PYTHON:-python3}
standins=""
megabytes=256
if [ "${1:-}" = --stand-ins ]; then
  standins=$(cd -- "$2" && pwd) || exit 1
  megabytes=4
  export LD_LIBRARY_PATH=$standins${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export KUNGFU_DEVICE_RUNTIME_LIBRARY=$standins/libcudart.so.12 KUNGFU_DEVICE_ENGINE_LIBRARY=$standins/libnccl.so.2
  export STANDIN_DEVICES=1
elif [ $# -gt 0 ]; then
  echo "usage: $0 [--stand-ins FOLDER]" >&2
  exit 2
fi

echo "commit: $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $(date -u +%F)"
if [ -z "$standins" ]; then
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || exit 1
  nvcc --version | tail -2
fi

if ! "$python" -c 'import ms_kungfu._core, numpy' 2>/dev/null; then
  build=$root/build/run-gpu
  cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DKUNGFU_BUILD_KERNELS=OFF -DPython_EXECUTABLE="$(command -v "$python")" \
    -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" && cmake --build "$build" --parallel "$(nproc)" &&
    cmake --install "$build" --prefix "$build/site" && cp -r ms_kungfu "$build/site/" || exit 1
  export PYTHONPATH=$build/site${PYTHONPATH:+:$PYTHONPATH}
  "$python" -c 'import ms_kungfu._core, numpy' || exit 1
fi

summary=() failed=0
part() { # NAME COMMAND...
  local name=$1 result=ok start=$SECONDS
  shift
  printf '\n=== %s\n' "$name"
  "$@" </dev/null || result="FAILED (exit $?)"
  [ "$result" = ok ] || failed=1
  summary+=("$(printf '%5d s  %-60s %s' $((SECONDS - start)) "$name" "$result")")
}
skip() { summary+=("$(printf '%5s    %-60s skipped: %s' - "$1" "$2")"); }

ranks() { "$python" tests/devices/ranks.py "$@"; }
shared() { CUDA_VISIBLE_DEVICES=0 ranks "$@"; }
programs=tests/devices/programs
declarations() { # OPTION...
  nvcc -std=c++17 -c -o /dev/null -Iops_src -Iops_src/include "$@" tests/devices/declarations.cc
}
shares="staging: rank 0 and rank 1 share device"
has_nccl() {
  KUNGFU_DEVICE_ENGINE=vendor "$python" -c 'import ms_kungfu as kf; kf.init(device="GPU")' 2>&1 | tail -1
}

export KUNGFU_DEVICE_CHUNK_BYTES=65536
if [ -z "$standins" ]; then
  part "our declarations of the CUDA runtime are nvcc's" declarations
  nccl_h=$("$python" -c 'import importlib.util as u; s = u.find_spec("nvidia.nccl"); print(list(s.submodule_search_locations)[0] + "/include" if s else "")' 2>/dev/null)
  if [ -n "$nccl_h" ] || [ -e /usr/include/nccl.h ]; then
    part "our declarations of NCCL are nccl.h's" declarations -DKUNGFU_NCCL ${nccl_h:+-I"$nccl_h"}
  else
    skip "our declarations of NCCL are nccl.h's" "no nccl.h"
  fi
fi
nccl_missing=$(has_nccl)
if [ -z "$nccl_missing" ]; then
  KUNGFU_DEVICE_ENGINE=vendor part "NCCL, 1 rank: every dtype and operation against NumPy" \
    ranks 1 $programs/device_collectives.py GPU NCCL
  KUNGFU_DEVICE_ENGINE=vendor part "NCCL, 1 rank: a team for each of 20 cluster versions" \
    ranks 1 $programs/device_rebuilds.py GPU 20
  if [ -z "$standins" ] && [ "$(nvidia-smi -L | wc -l)" -ge 2 ]; then
    KUNGFU_DEVICE_ENGINE=vendor part "NCCL, 2 ranks on 2 GPUs" ranks 2 $programs/device_collectives.py GPU NCCL
  else
    skip "NCCL, 2 ranks on 2 GPUs" "one GPU"
  fi
else
  skip "NCCL, 1 rank" "$nccl_missing"
fi
for n in 2 3; do
  part "staging, $n ranks on one GPU: every dtype and operation" \
    shared "$n" $programs/device_collectives.py GPU "$shares"
done
part "staging, 3 ranks on one GPU: any order, threads, mistakes" shared 3 $programs/device_order.py GPU
if [ -n "$standins" ]; then
  skip "compute-sanitizer" "stand-ins"
elif sanitizer=$(command -v compute-sanitizer); then
  checked() { "$sanitizer" --error-exitcode 9 --target-processes all "$@"; }
  part "compute-sanitizer, staging, 2 ranks" checked env CUDA_VISIBLE_DEVICES=0 \
    "$python" tests/devices/ranks.py 2 $programs/device_collectives.py GPU "$shares"
  if [ -z "$nccl_missing" ]; then
    KUNGFU_DEVICE_ENGINE=vendor part "compute-sanitizer, NCCL, 1 rank" checked \
      "$python" tests/devices/ranks.py 1 $programs/device_rebuilds.py GPU 2
  fi
else
  skip "compute-sanitizer" "not installed"
fi
unset KUNGFU_DEVICE_CHUNK_BYTES
bench() { # RANKS: fails below 0.7 of the bound, on a real GPU
  local line
  line=$(KUNGFU_DEVICE_ENGINE=staging shared "$1" "$programs/device_bench.py" GPU "$megabytes") || return 1
  echo "$line"
  [ -n "$standins" ] || "$python" -c 'import json, sys; sys.exit(json.loads(sys.argv[1])["share_of_bound"] < 0.7)' "$line"
}
for n in 2 4; do
  [ -n "$standins" ] && [ "$n" = 4 ] && continue
  part "bench: staging, $n ranks, at 0.7 of its bound or more" bench "$n"
done
if "$python" -c 'import mindspore' 2>/dev/null && [ -z "$standins" ]; then
  part "MindSpore accepts the GPU and our plugin" "$python" -c '
import mindspore, ms_kungfu.ops as ops, numpy as np
mindspore.set_device("GPU")
x = mindspore.Tensor(np.arange(5), mindspore.float32)
assert (ops.KungFuAllReduce()(x).asnumpy() == np.arange(5)).all()'
else
  skip "the primitives in MindSpore" "no MindSpore here"
fi

printf '\n=== summary\n'
printf '%s\n' "${summary[@]}"
exit $failed
