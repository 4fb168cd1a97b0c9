"""The index in tests/README.md names the files with tests, and none that isn't there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_index_lists_exactly_the_files_that_start_processes() -> None:
    files = [*TESTS.rglob("test_*.py"), *TESTS.glob("cpp/*_test.cc")]
    index = (TESTS / "README.md").read_text().partition("## Where a behaviour is tested")[2]
    named = set()
    for name in re.findall(r"`([\w/*]+\.(?:py|cc))`", index):
        found = [path for path in files if path.match(name)]
        assert found, f"{name} is in the index, and isn't there"
        assert "*" in name or len(found) == 1, f"{name} may be any of {found}"
        named.update(found)
    missing = sorted(str(path.relative_to(TESTS)) for path in set(files) - named if path.parent.name != "unit")
    assert not missing, f"not in the index: {missing}"
