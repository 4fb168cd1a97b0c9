#!/usr/bin/env bash
# The C++ tests compiled for aarch64 and run under qemu-user, which emulates one: it shows what the compiler makes of our atomics and
# sizes there. An x86-64 below it keeps more order between memory accesses than a real one does, so what only those get wrong isn't seen.
#
#     tests/cpp/aarch64.sh         # all
#     tests/cpp/aarch64.sh REGEX   # those that ctest -R selects
#
# With root apt-get installs the compiler, qemu-user and GoogleTest's sources; without them it says so and does nothing; exit status 77.
set -euo pipefail

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
sysroot=/usr/aarch64-linux-gnu
build=build/aarch64
mkdir -p build

there() { command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64 && [ -e /usr/src/googletest/CMakeLists.txt ]; } >/dev/null
if ! there && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
    g++-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user libgtest-dev; } >build/aarch64-apt.log 2>&1 || true
fi
if ! there; then
  echo "skipped: this takes aarch64-linux-gnu-g++, qemu-aarch64 and /usr/src/googletest (Debian's g++-aarch64-linux-gnu, qemu-user," \
    "libgtest-dev), and apt-get can't install them here"
  exit 77 # .ci/run says "skipped"
fi

# OpenSSL, which the tests of TLS open; unpacked, since an aarch64 package isn't to be installed here.
openssl=$PWD/build/aarch64-openssl
if [ ! -d "$openssl/usr" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  mkdir -p "$openssl/lists/partial"
  foreign=(-oAPT::Architecture=arm64 -oAPT::Architectures=arm64 "-oDir::State::Lists=$openssl/lists")
  (cd "$openssl" && apt-get "${foreign[@]}" update -q && apt-get "${foreign[@]}" download -q libssl3 && dpkg -x libssl3_*.deb .) \
    >"$openssl/apt.log" 2>&1 || echo "OpenSSL for aarch64 isn't to be had: its tests will fail ($openssl/apt.log)"
fi
export QEMU_SET_ENV=LD_LIBRARY_PATH=$openssl/usr/lib/aarch64-linux-gnu

cmake -G Ninja -S . -B "$build" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc \
  "-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;$sysroot" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE=-O1 \
  -DKUNGFU_BUILD_PYTHON=OFF -DKUNGFU_BUILD_TESTS=ON -DCMAKE_UNITY_BUILD=ON >build/aarch64.log
cmake --build "$build"
exec ctest --test-dir "$build" --output-on-failure --no-tests=error --timeout 300 --parallel "$(nproc)" ${1:+-R "$1"}
