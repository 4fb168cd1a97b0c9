"""LeNet for two minutes with a death or a resize every few seconds; longer: ``python -m tests.campaigns soak``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "lenet-elastic"
SECONDS = int(os.environ.get("KUNGFU_SOAK_SECONDS", "120"))


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(4 * SECONDS + 300)
def test_lenet_minds_nothing(tmp_path: Path) -> None:
    for module in ("mindspore", "sklearn", "matplotlib", "tqdm"):
        pytest.importorskip(module)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["./run-elastic.sh", "--chaos", "--out", tmp_path],
        cwd=EXAMPLE, env={**os.environ, "PATH": path, "CHAOS_SECONDS": str(SECONDS)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-12000:]
    kills, resizes = map(int, re.findall(r"^chaos: (\d+) kills, (\d+) resizes", done.stdout, re.MULTILINE)[0])
    told = [line for line in done.stdout.splitlines() if line.startswith("chaos: ")]
    print(*told[-12:], sep="\n")
    assert kills + resizes >= SECONDS / 20, told
    assert int(re.findall(r"^chaos: (\d+) of \d+ worker processes", done.stdout, re.MULTILINE)[0]) >= 1
    assert "exact: each sample was trained once" in done.stdout
    assert int(re.findall(r"^chaos: (\d+) workers reported their parameters", done.stdout, re.MULTILINE)[0]) >= 1
