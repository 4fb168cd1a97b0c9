"""Decide whether the workers of a program can be forked from a process that has already imported MindSpore.

`import mindspore` takes about a second of processor time. The fork server (`agent/fork_server.py`) imports MindSpore
once for all workers of a host, so a forked worker starts without this second. The program must not notice that. In
particular, MindSpore reads environment variables while it is imported, so a program may set a variable before the
import. A program's workers are therefore started separately unless all of these conditions hold:

1. The command is a Python interpreter with a script, or with a module in the current folder. Only flags that don't
   change where Python finds modules precede the script.
2. The script imports MindSpore at its top, and only a docstring and other imports come before.
3. Before MindSpore, the script imports only the standard library, NumPy, ms_kungfu, and modules of its own folder. The
   modules of its own folder contain no name that could change the process (`_CHANGES`).
4. The environment has no variable whose effect depends on the moment of the import (`_FORBIDDEN`). These variables
   concern log files that a process opens during the import, and the cores to which OpenMP binds threads.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_CHANGES = frozenset(
    [
        "environ",
        "putenv",
        "unsetenv",
        "CDLL",
        "LoadLibrary",
        "dlopen",
        "sched_setaffinity",
        "setrlimit",
        "set_start_method",
        "fork",
        "signal",
        "warnings",
        "import_module",
        "__import__",
        "exec",
        "eval",
    ]
)
_FORBIDDEN = (
    "GLOG_log_dir",
    "GLOG_logtostderr",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "OMP_PLACES",
    "OMP_PROC_BIND",
    "PYTHONINSPECT",
    "PYTHONSAFEPATH",
)
_OTHERS = ("numpy", "ms_kungfu")
_UNKNOWN = "?"
_FLAG = re.compile(r"-[uOBbq]+")
_FLAGS_WITH_VALUE = ("-W", "-X")


@dataclass(frozen=True)
class Preloading:
    """A command whose workers can be forked.

    `python`: the interpreter and its flags. `program`: the script or, after `-m`, the module, and its arguments.
    `folder`: the first entry of the program's `sys.path`.
    """

    python: tuple[str, ...]
    is_module: bool
    program: tuple[str, ...]
    folder: str


def preloading_of(command: Sequence[str], environ: Mapping[str, str]) -> Preloading | None:
    """Return how to fork the workers of a command, or None if they can't be forked."""
    if not re.fullmatch(r"python(3(\.\d+)?)?", os.path.basename(command[0])) or any(map(environ.get, _FORBIDDEN)):
        return None
    words = list(command[1:])
    flags = []
    while words and (_FLAG.fullmatch(words[0]) or words[0] in _FLAGS_WITH_VALUE):
        taken = 2 if words[0] in _FLAGS_WITH_VALUE else 1
        flags += words[:taken]
        del words[:taken]
    is_module = words[:1] == ["-m"]
    words = words[is_module:]
    if not words or words[0].startswith("-"):
        return None
    try:
        folder = os.getcwd() if is_module else os.path.dirname(os.path.realpath(words[0]))
        path = Path(folder, *words[0].split(".")).with_suffix(".py") if is_module else Path(words[0])
        source = _Source(Path(folder))
        if path.suffix != ".py" or not path.is_file() or not source.imports_mindspore_first(path):
            return None
        package = words[0].rpartition(".")[0]
        if is_module and (path.with_suffix("").is_dir() or (package and not source.is_harmless(package))):
            return None
        return Preloading((command[0], *flags), is_module, tuple(words), folder)
    except (OSError, SyntaxError, ValueError):  # Python reports this error
        return None


class _Source:
    """The source of a program and of its own modules, which are the modules in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[Path] = set()

    def imports_mindspore_first(self, script: Path) -> bool:
        """Return whether the script imports MindSpore before it does anything that might matter to the import."""
        for statement in ast.parse(script.read_bytes()).body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue
            if not isinstance(statement, (ast.Import, ast.ImportFrom)):
                return False
            for name in _names(statement):
                if name.split(".")[0] == "mindspore":
                    return True
                if not self.is_harmless(name):
                    return False
        return False

    def is_harmless(self, name: str) -> bool:
        """Return whether the import of a module changes nothing that MindSpore's import depends on."""
        if name == _UNKNOWN:
            return False
        top = name.split(".")[0]
        if any(path.exists() for path in self._files(top)):
            return all(self._is_harmless_file(path) for path in self._files(name) if path.is_file())
        return top in (*_OTHERS, "mindspore") or top in getattr(sys, "stdlib_module_names", ())

    def _is_harmless_file(self, path: Path) -> bool:
        if path in self._seen:
            return True
        self._seen.add(path)
        tree = ast.parse(path.read_bytes())
        if any(map(_may_change_the_process, ast.walk(tree))):
            return False
        return all(self.is_harmless(name) for each in _that_run(tree) for name in _names(each))

    def _files(self, name: str) -> list[Path]:
        """Return the files that an import of the module would run if the program's folder contains the module."""
        parts = name.split(".")
        packages = [self._folder.joinpath(*parts[: n + 1], "__init__.py") for n in range(len(parts))]
        return [*packages, self._folder.joinpath(*parts).with_suffix(".py")]


def _may_change_the_process(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        of_sys = isinstance(node.value, ast.Name) and node.value.id == "sys"
        return node.attr in _CHANGES or (of_sys and node.attr in ("path", "modules"))
    if isinstance(node, ast.alias):
        return not _CHANGES.isdisjoint(node.name.split("."))
    return isinstance(node, ast.Name) and node.id in _CHANGES


def _that_run(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom | ast.Expr]:
    """Yield the imports and the calls that run when a module is imported, but not those in functions."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.Expr):
            if not isinstance(each.value, ast.Constant):
                yield each
        elif isinstance(each, (ast.Import, ast.ImportFrom)):
            yield each
        elif isinstance(each, ast.If) and "__name__" in ast.unparse(each.test):
            yield from _that_run(ast.Module(each.orelse, []))
        elif not isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _that_run(each)


def _names(statement: ast.Import | ast.ImportFrom | ast.Expr) -> list[str]:
    """Return the modules that a statement may import; `_UNKNOWN` if they can't be determined."""
    if isinstance(statement, ast.Expr):
        return [_UNKNOWN]  # a call for its effect, such as `logging.setLoggerClass`
    if isinstance(statement, ast.Import):
        return [each.name for each in statement.names]
    if statement.level or statement.module is None or statement.names[0].name == "*":
        return [_UNKNOWN]
    return [statement.module, *(f"{statement.module}.{each.name}" for each in statement.names)]
