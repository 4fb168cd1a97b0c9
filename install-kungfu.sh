#!/usr/bin/env bash
# Installs ms_kungfu and MindSpore into a virtual environment. `install-kungfu.sh --help` prints the options.
#
# It writes the virtual environment, and the folder build/ next to this file. It removes nothing. pip's configuration
# selects the package registry. The script works without HOME and PATH, and from any folder.
set -euo pipefail

PATH="${PATH:+$PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
export PATH
HOME="${HOME:-$(cd ~ 2>/dev/null && pwd || echo /)}"
export HOME
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
default_mindspore=2.10.0
arguments=("$@")
extras_there=$(sed -n '/^\[project\.optional-dependencies\]$/,/^\[/s/^\([a-z]*\) = \[.*/\1/p' "$root/pyproject.toml" | paste -sd' ')

usage() {
  cat <<TEXT
usage: install-kungfu.sh [--venv DIR] [--python PYTHON] [--mindspore VERSION] [--extras LIST] [--apt]

Installs MindSpore and ms_kungfu into a virtual environment, tests the two together with two workers, and prints the
next command. Does only what is left to do: a second run takes a second.

  --venv DIR           the virtual environment, made if it isn't there (default: the active one, else .venv in the
                       checkout)
  --python PYTHON      the interpreter for a new virtual environment (default: the first Python 3.9 to 3.12 that suits)
  --mindspore VERSION  the MindSpore to install and to build for (default: the one that is installed in the virtual
                       environment, else $default_mindspore)
  --extras LIST        also what these need, comma-separated:
                       ${extras_there// /, }
  --apt                install what is missing of the system (compiler, Python's headers, venv) with apt-get, rather
                       than only naming it; needs root
  -h, --help           this text
TEXT
}

say() { printf '%s\n' "$*"; }
die() {
  printf 'install-kungfu.sh: %s\n' "$*" >&2
  exit 1
}
misuse() {
  printf 'install-kungfu.sh: %s; see install-kungfu.sh --help\n' "$*" >&2
  exit 2
}

trap 'die "stopped at its line $LINENO, which is a fault of this script; please report it"' ERR

# --- arguments

venv="" python="" mindspore="" extras="" apt=""
while [ $# -gt 0 ]; do
  option=$1
  shift
  case $option in
    --venv=* | --python=* | --mindspore=* | --extras=*)
      set -- "${option#*=}" "$@"
      option=${option%%=*}
      ;;
    --venv | --python | --mindspore | --extras) [ $# -gt 0 ] || misuse "$option needs a value" ;;
  esac
  case $option in
    -h | --help)
      usage
      exit 0
      ;;
    --apt) apt=yes ;;
    --venv | --python | --mindspore | --extras)
      [ -n "$1" ] || misuse "$option needs a value"
      declare "${option#--}=$1"
      shift
      ;;
    *) misuse "unknown argument '$option'" ;;
  esac
done

[ "$(uname -s)" = Linux ] || die "MindSpore's wheels and ms_kungfu are for Linux, this is $(uname -s)"

read -ra asked_extras <<<"${extras//,/ }"
for extra in "${asked_extras[@]}"; do
  case " $extras_there " in *" $extra "*) ;; *) misuse "--extras '$extra' is none of ${extras_there// /, }" ;; esac
done

# Read the accepted versions from pyproject.toml, so that they are defined only once.
read -r lowest limit < <(sed -n 's/.*"mindspore>=\([0-9.]*\),<\([0-9.]*\)".*/\1 \2/p' "$root/pyproject.toml")
in_order() { printf '%s\n%s\n' "$1" "$2" | sort -VC; }
accepted() { in_order "$lowest" "$1" && ! in_order "$limit" "$1"; }
if [ -n "$mindspore" ]; then
  [[ $mindspore =~ ^[0-9]+(\.[0-9a-z]+)+$ ]] || misuse "--mindspore '$mindspore' is no version, such as $default_mindspore"
  accepted "$mindspore" || die "ms_kungfu works with MindSpore $lowest or newer, older than $limit; got $mindspore"
fi

active=${VIRTUAL_ENV:-}
venv=${venv:-${active:-$root/.venv}}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A -- "$venv" 2>/dev/null || echo file)" ]; then
  die "$venv exists and is not a virtual environment; give another --venv"
fi

# --- the existing installation

# Prints "VERSION-OF-PYTHON VERSION-OF-MINDSPORE none|installed|editable RECORD", with - for no MindSpore. RECORD
# identifies the installation of ms_kungfu by pip's list of files, or is "damaged" if a file is missing or truncated.
inspect() {
  "$venv/bin/python" -I - <<'PYTHON'
import hashlib
import sys
from importlib.metadata import PackageNotFoundError, distribution

def found(name):
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None

mindspore, ours = found("mindspore"), found("ms-kungfu")
editable = ours and '"editable": true' in (ours.read_text("direct_url.json") or "")
state = "editable" if editable else "installed" if ours else "none"


def is_whole(file):
    path = file.locate()
    # Python may create and delete its caches at any time.
    return file.suffix == ".pyc" or path.is_file() and file.size in (None, path.stat().st_size)

files = ours and ours.files or []
listed = hashlib.sha256((ours and ours.read_text("RECORD") or "").encode()).hexdigest()
record = listed if files and all(map(is_whole, files)) else "damaged"
print("%d.%d" % sys.version_info[:2], mindspore.version if mindspore else "-", state, record)
PYTHON
}

python_version="" installed_mindspore=- state=none record=""
if [ -x "$venv/bin/python" ] && facts=$(inspect); then
  read -r python_version installed_mindspore state record <<<"$facts"
fi
if [ -z "$mindspore" ]; then
  mindspore=$default_mindspore
  if [ "$installed_mindspore" != - ]; then
    accepted "$installed_mindspore" || die "$venv has MindSpore $installed_mindspore, ms_kungfu works with $lowest or newer," \
      "older than $limit; --mindspore $default_mindspore replaces it, --venv DIR leaves it alone"
    mindspore=$installed_mindspore
  fi
fi
# MindSpore has wheels for Python 3.9 to 3.12, but since MindSpore 2.10 not for Python 3.9.
oldest_minor=9
if in_order 2.10 "$mindspore"; then oldest_minor=10; fi
pythons="Python 3.$oldest_minor to 3.12"
fits() { [[ $1 =~ ^3\.([0-9]+)$ ]] && [ "${BASH_REMATCH[1]}" -ge $oldest_minor ] && [ "${BASH_REMATCH[1]}" -le 12 ]; }

# The fingerprint covers the paths, because scripts in the virtual environment contain them.
fingerprint() {
  {
    printf '%s\n' "$root" "$venv" "$python_version" "$mindspore"
    cd -- "$root"
    find CMakeLists.txt pyproject.toml cmake ops_src kernels ms_kungfu -type f ! -name '*.pyc' ! -name '*.so' -print0 |
      LC_ALL=C sort -z | xargs -0 sha256sum
  } | sha256sum | cut -d' ' -f1
}

# The stamp contains the fingerprint of the last build, the RECORD that `inspect` printed after it, and the extras.
stamp=$venv/.ms_kungfu-installed
done_hash="" done_record="" done_extras=""
if [ "$state" != none ] && [ "$installed_mindspore" = "$mindspore" ] && [ -r "$stamp" ]; then
  read -r done_hash done_record done_extras <"$stamp" || true
fi
# The fingerprint covers only the sources, so also detect another installation since then, and missing files.
if [ "$done_record" != "$record" ]; then done_hash=""; fi
hash=$(fingerprint)
new_extras=""
for extra in "${asked_extras[@]}"; do
  case ,$done_extras, in *",$extra,"*) ;; *) new_extras+=${new_extras:+,}$extra ;; esac
done

here=$PWD
next() {
  say "Next:"
  if [ "$venv" != "$active" ]; then say "  source $(printf %q "${venv#"$here/"}/bin/activate")"; fi
  local example=$root/examples/lenet-elastic/run-elastic.sh
  say "  $(printf %q "${example#"$here/"}")"
}

if [ "$hash" = "$done_hash" ] && [ -z "$new_extras" ]; then
  say "ms_kungfu is installed and up to date in $venv (MindSpore $mindspore)."
  next
  exit 0
fi

# --- the system's requirements

missing=()
# Returns 0 if there is a compiler that supports C++17 and finds this header.
compiles() {
  local name
  for name in "${CXX:-c++}" g++ clang++; do
    if printf '#include <%s>\nint main() {}\n' "$1" | "$name" -std=c++17 -x c++ -fsyntax-only - 2>/dev/null; then return 0; fi
  done
  return 1
}
version_of() {
  # Run the interpreter: a version manager may leave a file for a Python that doesn't start.
  "$1" -I -c 'import sys; sys.implementation.name == "cpython" and print("%d.%d" % sys.version_info[:2])' 2>/dev/null |
    grep .
}
has_headers() {
  "$1" -I -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' 2>/dev/null
}
has_venv() { "$1" -I -c 'import ensurepip, venv' 2>/dev/null; }

# Sets `python` and `python_version` to the first suitable interpreter. Prefers one with headers and venv.
find_python() {
  local candidate path version seen="" fallback=""
  local -a candidates=(python3.11 python3.12 python3.10 python3.9 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python)
  if [ -n "$python" ]; then candidates=("$python"); fi
  for candidate in "${candidates[@]}"; do
    path=$(command -v -- "$candidate") || continue
    version=$(version_of "$path") || continue
    seen+="${seen:+, }$path ($version)"
    fits "$version" || continue
    if has_headers "$path" && has_venv "$path"; then
      python=$path python_version=$version
      return 0
    fi
    fallback=${fallback:-$path $version}
  done
  if [ -n "$fallback" ]; then
    python=${fallback% *} python_version=${fallback##* }
    return 0
  fi
  no_python="MindSpore $mindspore needs $pythons; found ${seen:-none${python:+ at $python}}"
  if [ $oldest_minor -gt 9 ] && [[ $seen == *"(3.9)"* ]]; then no_python+=" (MindSpore 2.9.0 works with 3.9: --mindspore 2.9.0)"; fi
  return 1
}

check_system() {
  missing=()
  no_python=""
  if [ -x "$venv/bin/python" ]; then
    python_version=$(version_of "$venv/bin/python") || die "$venv/bin/python does not start; remove $venv or give another --venv"
    fits "$python_version" || die "$venv has Python $python_version, MindSpore $mindspore needs $pythons; give another --venv"
    has_headers "$venv/bin/python" || missing+=("python$python_version-dev")
  elif find_python; then
    has_venv "$python" || missing+=("python$python_version-venv")
    has_headers "$python" || missing+=("python$python_version-dev")
  elif [ -n "$python" ] || [ -x /usr/bin/python3 ] || ! command -v apt-get >/dev/null; then
    # If /usr/bin/python3 isn't suitable, apt-get has no better Python.
    die "$no_python; install one and name it with --python"
  else
    missing+=(python3 python3-venv python3-dev)
  fi
  compiles optional || missing+=(g++)
  case ,$new_extras, in *,test,* | *,dev,*) compiles gtest/gtest.h || missing+=(libgtest-dev) ;; esac
}

check_system
if [ ${#missing[@]} -gt 0 ]; then
  command="apt-get install -y ${missing[*]}"
  if ! command -v apt-get >/dev/null; then
    die "the build needs a C++17 compiler, Python's headers and its venv module; missing here: ${missing[*]} (Debian's names)"
  elif [ -z "$apt" ] || [ "$(id -u)" != 0 ]; then
    if [ "$(id -u)" != 0 ]; then command="sudo $command"; fi
    die "${no_python:+$no_python; }missing on this machine: ${missing[*]}; install with:  $command"
  fi
  say "Installing ${missing[*]} ..."
  { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q "${missing[@]}"; } </dev/null >&2 ||
    die "failed: $command"
  check_system
  [ ${#missing[@]} -eq 0 ] || die "${no_python:-$command went well, but still missing: ${missing[*]}}"
fi

need_space() { # DIR MIB PURPOSE
  local dir=$1 free
  while [ ! -d "$dir" ]; do dir=$(dirname -- "$dir"); done
  [ -w "$dir" ] || die "$dir is not writable; $3 goes there"
  free=$(($(df -Pk -- "$dir" | awk 'NR == 2 { print $4 }') / 1024))
  [ "$free" -ge "$2" ] || die "$3 needs $2 MiB in $1, and $free MiB are free there"
}
if [ "$installed_mindspore" != "$mindspore" ]; then
  need_space "$venv" 4096 "MindSpore (2.8 GB unpacked)"
  need_space "${TMPDIR:-/tmp}" 1536 "the download of MindSpore"
fi
need_space "$venv" 200 "the installation"
need_space "$root/build" 200 "the build"

# --- the installation

# Only one run at a time, because runs in this checkout share the build folder and usually the virtual environment.
mkdir -p -- "$root/build"
if command -v flock >/dev/null; then
  exec {lock}>"$root/build/install.lock"
  if ! flock -n "$lock"; then
    say "Waiting for another install-kungfu.sh in $root ..."
    flock -w 7200 "$lock" || die "another install-kungfu.sh has been running in $root for two hours; let it end first"
    # Start again from the beginning, because the other run may have done everything.
    exec {lock}>&-
    exec "$root/install-kungfu.sh" "${arguments[@]}"
  fi
fi

if [ ! -x "$venv/bin/python" ]; then
  say "Making the virtual environment $venv with $python (Python $python_version) ..."
  "$python" -m venv -- "$venv" >&2 || die "$python could not make a virtual environment in $venv"
fi
"$venv/bin/python" -I -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -I -m ensurepip >/dev/null 2>&1 ||
  die "$venv has no pip and no ensurepip to install it with; give another --venv"
export PATH="$venv/bin:$PATH" VIRTUAL_ENV=$venv
hash=$(fingerprint)

# Show pip's progress bars only on a terminal.
quiet=(--quiet)
if [ -t 1 ]; then quiet=(); fi
pip_install() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input install "${quiet[@]}" "$@" </dev/null >&2; }

cd -- "$root"
# Install CMake and Ninja with pip, so that the versions don't depend on the system. There is no build isolation below,
# so the tools' paths stay the same, and a second build compiles only what has changed.
mapfile -t tools < <(sed -n 's/^requires = \[\(.*\)\]$/\1/p' pyproject.toml | tr -d '" ' | sed 's/,\([a-z]\)/\n\1/g')
if [ "$installed_mindspore" != "$mindspore" ]; then say "Installing MindSpore $mindspore (hundreds of megabytes) ..."; fi
pip_install "mindspore==$mindspore" "numpy<2" "${tools[@]}" "cmake>=3.18" "ninja>=1.10" ||
  die "pip could not install MindSpore $mindspore and the build tools; its message is above"

say "Building and installing ms_kungfu (2 to 4 minutes on two idle cores) ..."
all_extras=$done_extras${new_extras:+${done_extras:+,}$new_extras}
editable=()
if [ "$state" = editable ]; then editable=(--editable); fi
pip_install --no-build-isolation "mindspore==$mindspore" "${editable[@]}" ".${all_extras:+[$all_extras]}" ||
  die "the build of ms_kungfu failed; the message is above"

say "Testing: two workers sum a tensor through MindSpore ..."
# Don't run this in the checkout, because it must test the installed package.
(cd / && kungfu-run -q -timeout 5m -np 2 "$venv/bin/python" -m ms_kungfu.tools.smoke </dev/null) ||
  die "ms_kungfu is installed, but two workers could not sum a tensor; the message is above"

read -r _ _ _ record < <(inspect)
printf '%s %s %s\n' "$hash" "$record" "$all_extras" >"$stamp"
say "ms_kungfu is installed in $venv (MindSpore $mindspore)."
next
