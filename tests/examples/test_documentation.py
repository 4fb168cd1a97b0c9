"""Every block of code in the pages runs, or says above itself why it isn't run, and is parsed then."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ms_kungfu._flags import UsageError
from ms_kungfu.launcher import distribute, host_flags, options
from tests.examples.documented import CODE, OTHER, ROOT, blocks, pages

PAGES = pages()
BLOCKS = [block for page in PAGES for block in blocks(page)]
RUN = {page: [b for b in blocks(page) if b.marker != "not run" and b.language in ("python", "bash")] for page in PAGES}


def name_of(path):
    return str(path.relative_to(ROOT))


def of(needs_mindspore):
    return [
        pytest.param(p, id=name_of(p))
        for p, b in RUN.items()
        if b and any(x.needs_mindspore for x in b) is needs_mindspore
    ]


def run(page, folder):
    """All of a page, from top to bottom: files are kept, then Python, then commands."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("KUNGFU_CONFIG_SERVER", None)

    def go(*command):
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, f"{name_of(page)}:\n{done.stdout[-6000:]}"
        return done.stdout

    for block in RUN[page]:
        if block.marker == "file":
            (folder / block.value).write_text(block.code, encoding="utf-8")
    if any(block.language == "python" and block.marker != "file" for block in RUN[page]):
        told = go(sys.executable, str(Path(__file__).with_name("documented.py")), str(page))
        assert told.count("--- ") == sum(b.language == "python" and b.marker != "file" for b in RUN[page])
    for block in RUN[page]:
        if block.language == "bash":
            go("bash", "-euo", "pipefail", "-c", block.code)


@pytest.mark.parametrize("page", of(needs_mindspore=False))
def test_blocks_run(page, tmp_path):
    run(page, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("page", of(needs_mindspore=True))
def test_blocks_with_mindspore_run(page, tmp_path):
    pytest.importorskip("mindspore")
    run(page, tmp_path)


def test_there_is_something_to_run():
    assert len(of(needs_mindspore=False)) >= 4
    assert len(of(needs_mindspore=True)) >= 10


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_has_a_language_and_parses(block):
    assert block.language in CODE + OTHER, f"{block}: ```{block.language}"
    if block.language == "diff":
        assert block.marker == "not run", f"{block} can't be run, so it has to say why"
    if block.language == "python":
        compile(block.code, str(block), "exec")
    if block.language == "bash":
        checked = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True)
        assert checked.returncode == 0, f"{block}: {checked.stderr}"
        for words in commands(block.code):
            check_command(words, block.page.parent)


def test_no_code_hides_as_an_indented_block():
    """Four spaces make a block, too, which nobody would run."""
    hidden = []
    for page in PAGES:
        text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        hidden += [f"{name_of(page)}: {line}" for line in re.findall(r"(?<=\n\n)    \S.*", text)]
    assert hidden == []


def commands(code):
    """The words of each command line, without comments and what is behind a pipe."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def check_command(words, folder=ROOT):
    """That the program, its script, its module and its flags are there."""
    program, rest = words[0], words[1:]
    if program == "kungfu-run" and rest[0] not in ("resize", "evict", "status"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(options, "check_program", lambda command: None)
            # This machine is the first host of a page's, whose secret is the page's too.
            patch.setattr(host_flags, "identify", lambda hosts, own, interface: hosts[0].name)
            patch.setattr(host_flags, "read_secret_file", lambda file: "5ec7e7" * 8)
            options.parse_command_line(rest)
    elif program == "kungfu-distribute":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(distribute.shutil, "which", lambda program: program)
            _, command = distribute._parse(rest)
            secret = distribute._secret_for(command, None)
            if secret:
                patch.setenv("KUNGFU_JOB_SECRET", secret)
            check_command(command, folder)
    elif program == "python" and rest[:1] == ["-m"]:
        assert importlib.util.find_spec(rest[1]) is not None, f"there is no module {rest[1]}"
    elif "/" in program and not program.startswith("/"):
        assert (ROOT / program).is_file() or (folder / program).is_file(), f"there is no {program}"


@pytest.mark.parametrize(
    "line",
    [
        "kungfu-run -nq 2 python train.py",
        "kungfu-run -np 2 -H a:1,b:1 python train.py",  # without a secret
        "kungfu-distribute -H a:1,b:1 kungfu-run -nq 2 -H a:1,b:1 python train.py",
        "kungfu-distribute -np 2 -H a:1,b:1 kungfu-run -H a:1,b:1 python train.py",
        "python -m ms_kungfu.docter",
        "examples/lenet-elastic/run.sh",
    ],
)
def test_a_command_that_is_not_there_is_seen(line):
    with pytest.raises((AssertionError, UsageError)):
        check_command(shlex.split(line))
