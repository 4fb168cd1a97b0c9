"""Check that the workers' program exists before they start."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence

from ms_kungfu._flags import UsageError


def check_program(command: Sequence[str]) -> None:
    """Raise UsageError if the program can't be started.

    Without this check, each worker would report the error.
    """
    program = command[0]
    if shutil.which(program) is None or os.path.isdir(program):
        if program.endswith(".py") and os.path.isfile(program):
            raise UsageError(f"{program} is a Python script; write kungfu-run ... python {' '.join(command)}")
        raise UsageError(f"program {program!r} is not an executable file, and PATH has no program of that name")
    script = _script_of(command)
    if script is not None and not os.path.exists(script):
        raise UsageError(f"script {script!r}, which {program} should run, doesn't exist on this host")


def _script_of(command: Sequence[str]) -> str | None:
    """Return the script that a command runs with a Python interpreter.

    Return None if the command runs a module, inline code, or a program other than Python.
    """
    if not re.fullmatch(r"(python|pypy)[0-9.]*", os.path.basename(command[0])):
        return None
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-"):
            return word
        if word == "--":
            return next(words, None)
        if word == "-" or re.match(r"-[a-zA-Z]*[mc]", word):
            return None
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            next(words, None)
    return None
