"""Every block of code in the pages runs, or says above itself why it isn't run, and is parsed then."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ms_kungfu._flags import UsageError
from tests.examples.commands import check_command, commands
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


def skeleton(page):
    """What a translation keeps: the levels of headings, the numbers of the prose, the code but for comments."""
    text = page.read_text(encoding="utf-8")
    code = [(b.language, re.sub(r"(^|\s+)#.*$", "", b.code, flags=re.MULTILINE)) for b in blocks(page)]
    prose = re.sub(r"^( *)```.*?^\1```$|<!--.*?-->|\]\([^)]*\)", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^#+", text, re.MULTILINE), sorted(set(re.findall(r"\d+(?:\.\d+)*", prose))), code


@pytest.mark.parametrize("page", ["README.md", "docs/start.md"])
def test_chinese_page_has_the_sections_numbers_and_code_of_the_english_one(page):
    headings, numbers, code = skeleton(ROOT / page)
    translated = skeleton((ROOT / page).with_suffix(".zh.md"))
    (language, first), *rest = translated[2]
    assert (language, first.split()[:2]) == ("bash", ["kungfu-run", "--msrun"])  # the way in of its readers
    assert (translated[0], translated[1], rest) == (headings, numbers, code)


def test_no_code_hides_as_an_indented_block():
    """Four spaces make a block, too, which no test would run."""
    hidden = []
    for page in PAGES:
        text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        hidden += [f"{name_of(page)}: {line}" for line in re.findall(r"(?<=\n\n)    \S.*", text)]
    assert hidden == []


@pytest.mark.parametrize(
    "line",
    [
        "kungfu-run -nq 2 python train.py",
        "kungfu-run -np 2 -H a:1,b:1 python train.py",  # without a secret
        "kungfu-distribute -H a:1,b:1 kungfu-run -nq 2 -H a:1,b:1 python train.py",
        "kungfu-distribute -np 2 -H a:1,b:1 kungfu-run -H a:1,b:1 python train.py",
        "python -m ms_kungfu.docter",
        "examples/lenet-elastic/run.sh",
        "kungfu-runn -np 2 python train.py",
        "kungfu-run resize 3 -nosuchflag",
        "kungfu-run resize three",
        "kungfu-run evict -secretfile x 0",
        "kungfu-run status --jason",
        "kungfu-config-server -prot 9100",
        "python -m ms_kungfu.doctor --jsn",
        "python -m ms_kungfu.doctor --js",  # argparse takes that, but it is nothing to write down
        "python -m benchmarks all_reduse -np 2",
        "python -m benchmarks all_reduce --nothing",
        "python -m benchmarks all_reduce --pauses kill",  # resize's
        "python -m ms_kungfu.chaos -fore 120 -- -np 2 python train.py",
        "python -m ms_kungfu.chaos -for 120 -- -nq 2 python train.py",
        "python -m ms_kungfu.env --json",
        "python -m tests.fault.simulate 45 --storey",
        "python examples/adaptive/compare.py --nosuch",
        "kungfu-run -np 2 python examples/adaptive/train.py --nosuch 3",
        "KUNGFU_LOG_LEVEL=DEBUG kungfu-run -nq 2 python train.py",
        "srun -N 2 kungfu-run -nosuch 2 python train.py",
        "docker run --rm ms_kungfu kungfu-run -nosuch 2 python train.py",
        "cd x && kungfu-run -nosuch 2 python t.py",
        "(cd x; kungfu-run -nosuch 2 python t.py) 2>&1 | tee log",
        "export SECRET=$(openssl rand -hex 32) && kungfu-run status --jason",
        "release/wheels.py --nosuch",
        "./install-kungfu.sh --nosuch",
        "tests/run.sh --everything",
    ],
)
def test_a_command_that_is_not_there_is_seen(line):
    with pytest.raises((AssertionError, UsageError)):
        check_line(line)


@pytest.mark.parametrize(
    "line",
    [
        "kungfu-run resize 3 -config-server http://127.0.0.1:9100/config",
        "kungfu-run evict -secret-file x 0",
        "kungfu-run status --json",
        "kungfu-run status http://127.0.0.1:9100/config -secret-file x",
        "kungfu-config-server -port 9100 -init first.json",
        "python -m ms_kungfu.doctor --json",
        "python -m benchmarks all_reduce -np 2",
        "python -m ms_kungfu.replay logs/ledger --until 3 -- python train.py",
        "python -m ms_kungfu.env > docs/environment.md",
        "python -m tests.fault.simulate 45 --story",
        "kungfu-run -np 2 python examples/adaptive/train.py --compute-ms 3",
        "KUNGFU_LOG_LEVEL=DEBUG kungfu-run -np 2 python train.py",
        "docker run --rm ms_kungfu kungfu-run -np 2 python train.py",
        "cd x && kungfu-run -np 2 python t.py 2>&1 | tee log",
        "release/wheels.py --sdist",
        "./install-kungfu.sh --extras=dev",
        "tests/run.sh --all",
    ],
)
def test_a_command_that_is_there_is_taken(line):
    check_line(line)


def check_line(line):
    for words in commands(line):
        check_command(words)


def test_the_words_of_a_command_are_found_between_those_of_the_shell():
    line = "(umask 077; A=1 kungfu-run -np 2 python 't x.py' 2>&1 >log | cat) && b >c  # kungfu-run"
    found = [["umask", "077"], ["A=1", "kungfu-run", "-np", "2", "python", "t x.py"], ["cat"], ["b"]]
    assert list(commands(line)) == found
