"""Whether a command line of a page would be taken: its program is there, and has its flags.

Nothing is run. Programs of ms_kungfu are asked up to their own parser's answer; of a script the flags are those that
its text has. What is behind a `python train.py` that isn't in the page's folder is the reader's own.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import io
import re
import shlex
from pathlib import Path

import pytest

from ms_kungfu.config_server import cli as config_server
from ms_kungfu.launcher import (
    cli,
    distribute,
    explain_command,
    host_flags,
    options,
    secret,
    status_command,
    top_command,
    trace_command,
)
from ms_kungfu.launcher import commands as changes
from ms_kungfu.launcher.dashboard import report
from tests.examples.documented import ROOT

ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
FLAG = re.compile(r"--?[a-zA-Z]")
OURS = ("kungfu-run", "kungfu-distribute", "kungfu-config-server")
# They start what comes behind their own flags.
STARTERS = ("srun", "docker", "buildah", "ray", "env", "exec", "nice", "nohup", "ssh", "sudo", "time", "timeout")
# Programs of others that pages use, and words of the shell.
OTHERS = (
    *STARTERS, ".", "cd", "cmake", "curl", "echo", "exit", "export", "key", "kill", "kubectl", "mypy", "openssl", "pip",
    "pytest", "ruff", "sbatch", "scontrol", "source", "tee", "test", "tr", "umask",
)  # fmt: skip


class TakenError(Exception):
    """Not wrong: the program has taken its command line, and would begin now."""


def commands(code):
    """The words of each command, without comments and without where its output goes."""
    for line in code.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = []
        tokens = list(lexer)
        for number, token in enumerate(tokens):
            if number and set(tokens[number - 1]) & set("<>"):
                continue  # a file
            if set(token) & set("<>") and not set(token) - set("<>&|"):
                if words and words[-1] in ("1", "2") and f"{words[-1]}{token}" in line:
                    words.pop()
            elif token and not set(token) - set(";&|()"):
                if words:
                    yield words
                words = []
            else:
                words.append(token)
        if words:
            yield words


def check_command(words, folder=ROOT):
    """AssertionError or UsageError where the program, its script, its module or a flag isn't there."""
    while words and (ASSIGNMENT.match(words[0]) or words[0] in ("if", "then", "do", "while", "!")):
        words = words[1:]
    if not words:
        return
    program, rest = words[0], words[1:]
    if program == "kungfu-run":
        _check_kungfu_run(rest, folder)
    elif program == "kungfu-distribute":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(distribute.shutil, "which", lambda program: program)
            _, command = distribute._parse(rest)
            made = distribute._secret_for(command, None)
            if made:
                patch.setenv("KUNGFU_JOB_SECRET", made)
            check_command(command, folder)
    elif program == "kungfu-config-server":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(config_server, "_read_cluster", lambda path: None)
            patch.setattr(config_server.asyncio, "run", lambda served: (served.close(), taken()))
            patch.setattr(config_server, "raise_descriptor_limit", lambda: None)
            would_begin(config_server.main, rest)
    elif program in ("python", "python3") and rest[:1] == ["-m"]:
        _check_module(rest[1], rest[2:], folder)
    elif program in ("python", "python3"):
        if rest and not rest[0].startswith("-") and (folder / rest[0]).is_file():
            _check_script(folder / rest[0], rest[1:])
    elif "/" in program and not program.startswith("/") and "$" not in program:
        script = next((place / program for place in (ROOT, folder) if (place / program).is_file()), None)
        if script is None:  # what is made by a command before it; a virtual environment's
            assert program.startswith(("build/", ".venv/")), f"there is no {program}"
        else:
            _check_script(script, rest)
    else:
        assert program in OTHERS, f"there is no program {program}"
        if (
            program in STARTERS
            and (first := next((n for n, word in enumerate(rest) if word in OURS), None)) is not None
        ):
            check_command(rest[first:], folder)


def _check_kungfu_run(rest, folder):
    with pytest.MonkeyPatch.context() as patch:
        # This machine is the first host of a page's, whose secret is the page's too.
        patch.setattr(options, "check_program", lambda command: None)
        patch.setattr(host_flags, "identify", lambda hosts, own, interface: hosts[0].name)
        patch.setattr(secret, "read_secret_file", lambda file: "5ec7e7" * 8)
        if rest[:1] and rest[0] in cli._COMMANDS:
            for module in (changes, status_command):
                patch.setattr(module, "secret_for", lambda environment, file, url: "5ec7e7" * 8)
                patch.setattr(module, "open_store", lambda *arguments, **more: taken())
            patch.setattr(changes, "_url_of_job", lambda program, pid: taken())
            patch.setattr(status_command, "jobs_of_this_user", lambda *arguments: taken())
            patch.setattr(top_command, "jobs_by_launcher", lambda *arguments: taken())
            patch.setattr(explain_command, "_read", lambda folder: taken())
            patch.setattr(report, "write_report", lambda logs, path: taken())
            patch.setattr(trace_command, "_read_all", lambda folders: taken())
            would_begin(cli.command(rest[0]), rest[1:])
        else:
            wanted = options.parse_command_line(rest)
            if isinstance(wanted, options.Options):
                own = [word for word in wanted.command if word]
                if own[:1] == ["python"]:
                    check_command(own, folder)


def _check_module(name, rest, folder):
    found = importlib.util.find_spec(name)
    assert found is not None, f"there is no module {name}"
    if not name.startswith(("ms_kungfu", "benchmarks")):
        if name.startswith("tests"):
            _check_script(Path(found.origin), rest)
        return
    module = importlib.import_module(f"{name}.__main__" if found.submodule_search_locations else name)
    if not hasattr(module, "main"):
        assert not any(map(FLAG.match, rest)), f"{name} has no flags"
        return
    parse_args, parse_known_args = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_known_args

    def whole_names(parser, *arguments):
        parser.allow_abbrev = False  # a page writes them in full
        return parse_known_args(parser, *arguments)

    def answered(parser, *arguments):
        parse_args(parser, *arguments)
        taken()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", whole_names)
        patch.setattr(argparse.ArgumentParser, "parse_args", answered)
        would_begin(module.main, rest)
    if "--" in rest:
        behind = rest[rest.index("--") + 1 :]
        check_command(["kungfu-run", *behind] if name == "ms_kungfu.chaos" else behind, folder)


def _check_script(path, rest):
    """Flags of a script are the names in its text, of a package's in that of any of its files."""
    texts = [path]
    source = path.read_text(encoding="utf-8")
    if path.name in ("__init__.py", "__main__.py") or "parse_known_args" in source:
        texts = sorted(path.parent.glob("*.py"))
    elif "*sys.argv[1:]" in source:  # another example's, to which it passes them on
        texts = sorted(path.parents[1].glob("*/*.py"))
    if path.suffix == ".py":
        nodes = [node for text in texts for node in ast.walk(ast.parse(text.read_text(encoding="utf-8")))]
        known = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    else:
        known = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", source))
    if path.suffix not in ("", ".sh", ".py") or rest[:1] == ["--"]:
        return
    for word in rest:
        if FLAG.match(word):
            assert word.partition("=")[0] in known, f"{path.relative_to(ROOT)} has no flag {word}"


def taken():
    raise TakenError


def would_begin(main, words):
    """AssertionError where it ends, rather than begin, with what it says then."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            status = main(words)
        except TakenError:
            return
        except SystemExit as ended:
            status = ended.code
    assert status in (0, None), f"{words}: {said.getvalue()}"
