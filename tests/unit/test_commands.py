"""`python -m ms_kungfu` names every command, and each that it names is there."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from ms_kungfu.__main__ import COMMANDS
from ms_kungfu.launcher import cli

ROOT = Path(__file__).resolve().parents[2]
# Started by other commands, not by people.
INTERNAL = re.compile(
    r"ms_kungfu(\.(launcher|config_server)(\..*)?|\.ray(\._function)?|\._smoke|\.bench\..*_worker|\.bench\.worker|)$"
)


def modules_to_run():
    for path in sorted((ROOT / "ms_kungfu").rglob("*.py")):
        if path.name == "__main__.py" or '__name__ == "__main__"' in path.read_text():
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__main__" else parts)


def test_every_command_is_named():
    scripts = re.findall(r'^(kungfu-\S+) = "', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert len(scripts) >= 3
    expected = {*scripts, *(f"kungfu-run {command}" for command in cli._COMMANDS)}
    expected |= {f"python -m {module}" for module in modules_to_run() if not INTERNAL.match(module)}
    assert set(COMMANDS) == expected
    for command in COMMANDS:
        if command.startswith("python"):
            assert importlib.util.find_spec(command.split()[-1])


def test_it_prints_a_line_each_without_loading_mindspore():
    code = "import sys; from ms_kungfu.__main__ import main; main([]); sys.exit('mindspore' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.strip() for line in done.stdout.splitlines() if line.startswith("  ")]
    assert [re.split(r"\s{2,}", line) for line in lines] == [[*item] for item in COMMANDS.items()]
