#!/usr/bin/env python3
"""Print the notes of a release: its section of CHANGELOG.md. Fail if the checkout isn't ready to be that release.

release/notes.py            # for the version of ms_kungfu/_version.py
release/notes.py --check    # only the check, also that the tag isn't taken
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CMAKE = Path("examples/cpp-all-reduce/CMakeLists.txt")  # CMake accepts only the package's own minor version


def version(root: Path) -> str:
    text = (root / "ms_kungfu" / "_version.py").read_text(encoding="utf-8")
    found = re.search(r'^VERSION = "(.+)"$', text, re.MULTILINE)
    assert found is not None, "ms_kungfu/_version.py has no VERSION"
    return found[1]


def section(changelog: str, wanted: str) -> tuple[str, str]:
    """Return the date and text of a version's section; two empty strings without one."""
    heading = rf"^## \[{re.escape(wanted)}\](?: - (\d{{4}}-\d\d-\d\d))?$"
    found = re.search(rf"{heading}\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return (found[1] or "", found[2].strip()) if found else ("", "")


def obstacles(root: Path, tags: Sequence[str]) -> Iterator[str]:
    """Yield what remains to do before this checkout can be a release."""
    own = version(root)
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    date, text = section(changelog, own)
    if not text:
        yield f"CHANGELOG.md has no section [{own}] with a text"
    elif not date:
        yield f"CHANGELOG.md's section [{own}] has no date, as in [{own}] - 2026-01-31"
    if section(changelog, "Unreleased")[1]:
        yield "CHANGELOG.md has entries under [Unreleased]"
    if f"version: {own}" not in (root / "CITATION.cff").read_text(encoding="utf-8").splitlines():
        yield f"CITATION.cff doesn't say version: {own}"
    minor = ".".join(own.split(".")[:2])
    for name, words in ((CMAKE, f"find_package(ms_kungfu {minor} "), (CMAKE.parent / "README.md", f"({minor}.x)")):
        if words not in (root / name).read_text(encoding="utf-8"):
            yield f"{name} isn't for version {minor}: it has no {words.strip()!r}"
    if f"v{own}" in tags:
        yield f"the tag v{own} already exists"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="print only what remains to do")
    asked = parser.parse_args(words)
    tags: list[str] = []
    if asked.check:
        tags = subprocess.run(["git", "tag"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    left = [*obstacles(ROOT, tags)]
    if left:
        sys.exit("".join(f"release/notes.py: {each}\n" for each in left).rstrip())
    if not asked.check:
        print(section((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version(ROOT))[1])


if __name__ == "__main__":
    main()
