"""``python -m ms_kungfu.c_api``: print where the C ABI's headers and library are (examples/cpp-all-reduce)."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ms_kungfu import _core
from ms_kungfu._processes import printing


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m ms_kungfu.c_api",
        description="Prints where the C ABI's headers and library are, for compilers and CMake.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--cmakedir", action="store_true", help="for find_package: -Dms_kungfu_DIR=...")
    what.add_argument("--includes", action="store_true", help="flags that find the headers: kungfu/c_api.h and others")
    what.add_argument("--libs", action="store_true", help="flags that link the runtime that Python loads")
    asked = parser.parse_args(arguments)
    package = Path(_core.__file__).parent  # in an editable install, the Python files are in another folder
    # Quote the flags for a shell, as pkg-config does. The output of --cmakedir is a single word, which the caller
    # quotes.
    words = [f"-L{package}", "-lkungfu_runtime", f"-Wl,-rpath,{package}"]
    if asked.includes:
        words = [f"-I{package / 'include'}"]
    with printing(parser.prog):
        print(package / "cmake" if asked.cmakedir else shlex.join(words))
    return 0


if __name__ == "__main__":
    sys.exit(main())
