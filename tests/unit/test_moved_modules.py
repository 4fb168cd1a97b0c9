"""Modules that have moved go on working under their old names, and say so once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ms_kungfu._alias import MOVED


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_name_is_the_module_itself_and_says_so_once(old: str) -> None:
    parent, _, name = old.rpartition(".")
    program = (
        f"from {parent} import {name} as first\nimport {old} as second\nfrom {old} import __name__ as told\n"
        f"import {MOVED[old]} as new\nassert first is second is new and told == {MOVED[old]!r}"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"{old} is called {MOVED[old]} now") == 1
