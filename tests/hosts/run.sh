#!/usr/bin/env bash
# tests/hosts/run.sh [pytest arguments]: jobs over several hosts, which are network namespaces of this machine.
#
#   tests/hosts/run.sh           installs what it needs and runs all of it
#   tests/hosts/run.sh --tools   installs no more than ip, tc and iptables, where root may do that
#
# Without root, or where the kernel allows no namespaces, the tests are skipped with that reason.
set -euo pipefail

export PATH="${PATH:+$PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)

missing=()
command -v ip >/dev/null && command -v tc >/dev/null || missing+=(iproute2)
command -v iptables >/dev/null || missing+=(iptables)
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q "${missing[@]}"; } </dev/null >&2 ||
      echo "apt-get can't install ${missing[*]}; the tests over several hosts will be skipped" >&2
  else
    echo "missing on this machine: ${missing[*]}; the tests over several hosts will be skipped" >&2
  fi
fi
if [ "${1:-}" = --tools ]; then exit 0; fi
exec "$root/tests/run.sh" --all "$root/tests/hosts" "$@"
