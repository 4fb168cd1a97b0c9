#!/usr/bin/env bash
# tests/engines/run.sh [pytest arguments]: jobs on etcd, on Slurm, on Ray, and the example for Kubernetes.
#
#   tests/engines/run.sh           installs what it needs and runs all of it
#   tests/engines/run.sh --tools   installs no more than that, where root may do so
#
# What is missing afterwards skips its tests, with that reason.
set -euo pipefail

export PATH="${PATH:+$PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)

missing=()
command -v etcd >/dev/null || missing+=(etcd-server)
command -v etcdctl >/dev/null || missing+=(etcd-client)
command -v openssl >/dev/null || missing+=(openssl)
{ command -v slurmctld && command -v slurmd && command -v srun && command -v munged; } >/dev/null || missing+=(slurm-wlm munge)
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    # The tests start their own: a package's service must not run beside them.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
      printf '#!/bin/sh\nexit 101\n' >"$policy"
      chmod 755 "$policy"
      trap 'rm -f "$policy"' EXIT
    fi
    { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"; } \
      </dev/null >&2 || echo "apt-get can't install ${missing[*]}; the tests on them will be skipped" >&2
    if [ -n "$(trap -p EXIT)" ]; then rm -f "$policy" && trap - EXIT; fi
  else
    echo "missing on this machine: ${missing[*]}; the tests on them will be skipped" >&2
  fi
fi
if [ "${1:-}" = --tools ]; then exit 0; fi
TESTS_EXTRAS=ray exec "$root/tests/run.sh" --all "$root/tests/engines" "$@"
