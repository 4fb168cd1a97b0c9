"""`python -m ms_kungfu` names every command, and each that it names is there."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ms_kungfu import __main__ as all_commands
from ms_kungfu import bench, c_api
from ms_kungfu.__main__ import COMMANDS
from ms_kungfu.launcher import cli

ROOT = Path(__file__).resolve().parents[2]
# Started by other commands, not by people.
INTERNAL = re.compile(r"ms_kungfu(\.(launcher|config_server)(\..*)?|\.ray(\._function)?|\.tools\.smoke|)$")


def modules_to_run():
    for path in sorted((ROOT / "ms_kungfu").rglob("*.py")):
        if path.name == "__main__.py" or re.search(r'^if __name__ == "__main__"', path.read_text(), re.MULTILINE):
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


def test_list_of_commands_is_printed_without_loading_mindspore():
    code = "import sys; from ms_kungfu.__main__ import main; main([]); sys.exit('mindspore' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.strip() for line in done.stdout.splitlines() if line.startswith("  ")]
    assert [re.split(r"\s{2,}", line) for line in lines] == [[*item] for item in COMMANDS.items()]


def test_the_documentation_is_where_it_is_said_to_be(monkeypatch, capsys, tmp_path):
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(all_commands, "checkout", lambda: str(tmp_path))
    all_commands.main([])
    assert f"The documentation is in {tmp_path}/docs/." in capsys.readouterr().out
    for gone in (None, str(tmp_path / "moved")):
        monkeypatch.setattr(all_commands, "checkout", lambda gone=gone: gone)
        all_commands.main([])
        assert "The documentation is in docs/ of the source distribution." in capsys.readouterr().out


def run(shell, *words):
    command = ["/bin/sh", "-c", f'"$0" "$@" {shell}', sys.executable, "-m", *words]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_list_of_variables_takes_h_and_nothing_else():
    assert run("", "ms_kungfu.env", "-h").stdout.startswith("usage: python -m ms_kungfu.env [-h]")
    done = run("", "ms_kungfu.env", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unrecognized arguments: --json" in done.stderr


PRINTING = [
    ("ms_kungfu",),
    ("ms_kungfu.env",),
    ("ms_kungfu.c_api", "--libs"),
    ("ms_kungfu.doctor",),
    ("ms_kungfu.fusion", "lenet"),
]


@pytest.mark.parametrize("words", PRINTING, ids=lambda words: words[0])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_output_that_goes_nowhere_is_one_sentence(words):
    for shell, why in ((">/dev/full", "No space left on device"), (">&-", "standard output is closed")):
        done = run(shell, *words)
        said = f"python -m {words[0]}: the output can't be written: {why}\n"
        assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize("source", [None, "/nowhere", str(ROOT)])
def test_bench_of_the_package_says_where_benchmarks_are(source, monkeypatch, capsys):
    monkeypatch.setattr(bench, "checkout", lambda: source)
    assert bench.main() == 2
    where = str(ROOT) if source == str(ROOT) else "a checkout of ms_kungfu"
    assert capsys.readouterr().err.endswith(
        f": the benchmarks are not part of the package; run python -m benchmarks in {where}\n"
    )


def test_flags_of_a_folder_with_spaces_are_words_of_a_shell(monkeypatch, capsys, tmp_path):
    package = tmp_path / "my env"
    monkeypatch.setattr(c_api._core, "__file__", str(package / "_core.so"))
    c_api.main(["--includes"])
    assert shlex.split(capsys.readouterr().out) == [f"-I{package}/include"]
    c_api.main(["--libs"])
    assert shlex.split(capsys.readouterr().out) == [f"-L{package}", "-lkungfu_runtime", f"-Wl,-rpath,{package}"]
    c_api.main(["--cmakedir"])
    assert capsys.readouterr().out == f"{package}/cmake\n"


def test_job_loads_no_module_of_commands_and_live_page():
    loads = (
        "import sys; import ms_kungfu.launcher.cli, ms_kungfu.launcher.agent.agent, "
        "ms_kungfu.launcher.controller.controller; print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True, check=True).stdout
    unused = {cli.command(name).__module__ for name in cli._COMMANDS}
    assert set(loaded.split()).isdisjoint(
        {*unused, "ms_kungfu.launcher.dashboard.requests", "ms_kungfu.launcher.state.timeline"}
    )
