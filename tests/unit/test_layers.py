"""The tables of layers in docs/architecture.md hold: what each imports, in Python and in C++, and no circle."""

import ast
import functools
import io
import os
import re
import tokenize
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
SOURCE_FILES = ROOT / "docs" / "source-files.md"
COMPILED = ("ms_kungfu._core",)  # modules without a file of Python's


NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
# Lines of code: blank lines, comments and docstrings don't count, so that prose is never shortened for the limit.
MOST_CLASS_LINES, MOST_FILE_LINES, MOST_EXCEPTIONS = 250, 420, 5

# Longer classes (`file:class`) and files, below ms_kungfu/, with the reason why each stays as it is.
LONGER: dict[str, str] = {
    "env.py": "all environment variables in one file",
    "launcher/agent/agent.py:Agent": "the handlers of all orders of a controller",
    "ray/driver.py:Driver": "one job from room on the cluster to its exit code; Ray's calls block",
}


@dataclass(frozen=True)
class Layer:
    name: str
    paths: tuple[str, ...]
    may_import: frozenset[str]


def layers(heading, page=None):
    """The rows of the table under this heading, from the ground up."""
    text = (PAGE.read_text() if page is None else page).split(f"### {heading}", 1)[1]
    found = []
    for line in text.splitlines()[1:]:
        if line.startswith("#"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or cells[0] in ("layer", "---"):
            continue
        name, files, _, allowed = cells
        names = [layer.name for layer in found]
        may = {"everything": names, "-": []}.get(allowed)
        may = [each.strip() for each in allowed.split(",")] if may is None else may
        assert set(may) <= set(names), f"{name}: {sorted(set(may) - set(names))} don't stand above it"
        found.append(Layer(name, tuple(path.rstrip("/") for path in re.findall(r"`([^`]+)`", files)), frozenset(may)))
    assert found, heading
    return found


def layer_of(path, table):
    """The layer of a file: the longest path that it is, or lies in."""
    fits = [(len(own), layer) for layer in table for own in layer.paths if path == own or path.startswith(own + "/")]
    return max(fits, key=lambda fit: fit[0])[1] if fits else None


def module_of(path):
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_import_call(node):
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in ("import_module", "__import__")


def is_facade(path):
    (facades,) = [layer for layer in layers("Python") if layer.name == "façades"]
    return layer_of(below_package(path), [facades]) is not None if path.parts[0] == "ms_kungfu" else False


@functools.cache
def imports(source):
    return [n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.Import, ast.ImportFrom)) or is_import_call(n)]


def named_in(call):
    """The module that is imported by a call; None where the name is computed."""
    literal = isinstance(call.args[0], ast.Constant) and not call.args[0].value.startswith(".")
    return call.args[0].value if literal else None


def computing(files):
    """The files that compute the name of what they import."""
    calls = {path: [n for n in imports(source) if isinstance(n, ast.Call)] for path, source in files.items()}
    return [path for path, found in sorted(calls.items()) if any(named_in(call) is None for call in found)]


def imported(source, path, modules):
    """The modules among `modules` that a file of Python imports anywhere, late or for type checkers alone, too. What a
    façade loads by a call when it is asked for a name is its task, and leads anywhere.

    `from package import name` imports the module of this name where there is one, else the package.
    """
    package = list(path.with_suffix("").parts[:-1])
    for node in imports(source):
        if isinstance(node, ast.Call):
            yield from [named_in(node)] if named_in(node) in modules and not is_facade(path) else []
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from [alias.name] if alias.name in modules else []
        else:
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                if full in modules or base in modules:
                    yield full if full in modules else base


def python_arrows(files):
    """{file: files it imports}, of {path below the root: source}."""
    modules = {module_of(path): path for path in files}
    modules |= {name: Path(*name.split(".")) for name in COMPILED}
    return {path: {modules[name] for name in imported(source, path, modules)} for path, source in files.items()}


def included(source, path, files):
    """The files of ours that a file of C++ includes: beside it, from ops_src, or from ops_src/include."""
    for name in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', source, re.MULTILINE):
        for folder in (path.parent, Path("kernels"), Path("ops_src"), Path("ops_src/include")):
            found = Path(os.path.normpath(folder / name))
            if found in files:
                yield found
                break


def cpp_arrows(files):
    return {path: set(included(source, path, files)) for path, source in files.items()}


def below_package(path):
    return path.relative_to("ms_kungfu").as_posix()


def violations(arrows, table, key):
    """What the table doesn't allow, as sentences."""
    found = []
    for path, targets in sorted(arrows.items()):
        layer = layer_of(key(path), table)
        if layer is None:
            found.append(f"{path} is in no layer")
            continue
        for target in sorted(targets):
            other = layer_of(key(target), table)
            if other is None:
                found.append(f"{target} is in no layer")
            elif other is not layer and other.name not in layer.may_import:
                found.append(f"{path} imports {target}: {layer.name} may not import {other.name}")
    return found


def circle(arrows):
    """Files that import each other in a circle, one after another; none: an empty list."""
    finished, under_way = set(), []

    def visit(path):
        if path in under_way:
            return [*under_way[under_way.index(path) :], path]
        if path in finished:
            return []
        under_way.append(path)
        for target in sorted(arrows.get(path, ())):
            found = visit(target)
            if found:
                return found
        finished.add(under_way.pop())
        return []

    return next((found for path in sorted(arrows) if (found := visit(path))), [])


def code_lines(source):
    """Return the numbers of the lines with code."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node, clean=False
        ):
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return found - docstrings


def over_the_limits(files):
    """{`file` or `file:class`: its lines of code} of what has more than it may."""
    found = {}
    for path, source in files.items():
        name, lines = below_package(path), code_lines(source)
        if len(lines) > MOST_FILE_LINES:
            found[name] = len(lines)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                length = len(lines.intersection(range(node.lineno, node.end_lineno + 1)))
                if length > MOST_CLASS_LINES:
                    found[f"{name}:{node.name}"] = length
    return found


def check_lengths(files, exceptions):
    """Classes and files are within the limits, but for the exceptions, each of which is needed."""
    found = over_the_limits(files)
    assert sorted(found.keys() - exceptions.keys()) == [], f"divide them, or say why not in LONGER: {found}"
    assert sorted(exceptions.keys() - found.keys()) == [], "within the limits: take them off the list"
    assert [name for name, reason in exceptions.items() if not reason.strip()] == [], "without a reason"


def python_files():
    return {path.relative_to(ROOT): path.read_text() for path in sorted((ROOT / "ms_kungfu").rglob("*.py"))}


def cpp_files():
    found = [path for folder in ("ops_src", "kernels") for path in sorted((ROOT / folder).rglob("*"))]
    return {path.relative_to(ROOT): path.read_text() for path in found if path.suffix in (".h", ".cc")}


def check(files, arrows_of, table, key):
    arrows = arrows_of(files)
    assert violations(arrows, table, key) == []
    assert circle(arrows) == []
    empty = [path for layer in table for path in layer.paths if not any(layer_of(key(f), [layer]) for f in files)]
    assert [path for path in empty if f"ms_kungfu.{path}" not in COMPILED] == [], "no such files"


def test_python_imports_downwards_only():
    check(python_files(), python_arrows, layers("Python"), below_package)


def test_only_files_that_may_import_everything_compute_a_name():
    free = [layer for layer in layers("Python") if layer.name in ("façades", "programs")]
    assert [path for path in computing(python_files()) if layer_of(below_package(path), free) is None] == []


def test_cpp_includes_downwards_only():
    check(cpp_files(), cpp_arrows, layers("C++"), Path.as_posix)


def test_no_class_over_250_and_no_file_over_420_lines_of_code():
    assert len(LONGER) <= MOST_EXCEPTIONS
    check_lengths(python_files(), LONGER)


def files_named_on(page):
    """The paths of a page whose headings are folders below ms_kungfu/, and whose tables name files there."""
    for section in page.split("\n## ")[1:]:
        folder = re.match(r"`([^`]+)`", section)[1]
        yield from (f"{folder}{name}" for name in re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


def test_page_of_source_files_names_each_file_once():
    named = list(files_named_on(SOURCE_FILES.read_text(encoding="utf-8")))
    found = [below_package(path) for path in python_files() if path.parts[1] in ("launcher", "elastic")]
    assert sorted(named) == sorted(name for name in found if not Path(name).name.startswith("__"))


def test_architecture_names_files_that_exist():
    paths = [f"/{path.as_posix()}" for path in (*python_files(), *cpp_files(), Path(__file__).relative_to(ROOT))]
    named = re.findall(r"`([\w/.]+\.(?:py|cc|h))`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 80
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in paths)] == []


# ---- the test can fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("membership/__init__.py", "def f():\n    from ms_kungfu import runtime"),
        ("runtime.py", "from . import comm"),
        ("comm.py", "if TYPE_CHECKING:\n    from ms_kungfu.elastic import ElasticTraining"),
        ("dataset/elastic.py", "import ms_kungfu.elastic.undo"),
        ("elastic/training.py", "from ms_kungfu import __version__"),
        ("monitoring/monitor.py", "from ..optimizers import monitored"),
        ("optimizers/pair.py", "def f():\n    from ms_kungfu.elastic import handover"),
        ("elastic/carried.py", "def f():\n    from ms_kungfu.optimizers import pair"),
        ("cluster.py", "importlib.import_module('ms_kungfu.comm')"),
    ],
)
def test_an_arrow_upwards_is_seen(path, line):
    files = python_files()
    files[Path("ms_kungfu", path)] += "\n" + line + "\n"
    (told,) = violations(python_arrows(files), layers("Python"), below_package)
    assert told.startswith(f"ms_kungfu/{path} imports ")


def lines_of(classes):
    """A file of these classes, `{name: lines}`."""
    return "".join(f"class {name}:\n" + "    x = 0\n" * (lines - 1) for name, lines in classes.items())


@pytest.mark.parametrize(
    ("classes", "exceptions", "wrong"),
    [
        ({"A": 251}, {}, r"a\.py:A"),
        ({"A": 250, "B": 171}, {}, r"a\.py"),
        ({"A": 250, "B": 170}, {"a.py:A": "a reason"}, "take them off"),
        ({"A": 251}, {"a.py:A": "a reason", "b.py": "of a file that is gone"}, "take them off"),
        ({"A": 251}, {"a.py:A": " "}, "without a reason"),
    ],
)
def test_excess_length_or_unneeded_exception_is_found(classes, exceptions, wrong):
    files = {Path("ms_kungfu/a.py"): lines_of(classes)}
    with pytest.raises(AssertionError, match=wrong):
        check_lengths(files, exceptions)


def test_length_within_the_limits_or_excepted_passes():
    files = {Path("ms_kungfu/a.py"): lines_of({"A": 250, "B": 170}), Path("ms_kungfu/b.py"): lines_of({"C": 251})}
    check_lengths(files, {"b.py:C": "a reason"})


def test_a_circle_within_a_layer_is_seen():
    files = python_files()
    files[Path("ms_kungfu/elastic/schedule.py")] += "\ndef f():\n    from ms_kungfu.elastic import training\n"
    found = circle(python_arrows(files))
    assert found[0] == found[-1]
    assert Path("ms_kungfu/elastic/schedule.py") in found


def test_a_file_of_no_layer_is_seen():
    files = python_files()
    files[Path("ms_kungfu/attic.py")] = ""
    assert violations(python_arrows(files), layers("Python"), below_package) == ["ms_kungfu/attic.py is in no layer"]


def test_an_include_upwards_is_seen():
    files = {
        Path("ops_src/base/error.cc"): '#include "runtime/peer.h"\n',
        Path("ops_src/runtime/peer.h"): '#include "peer_words.h"\n',
        Path("ops_src/runtime/peer_words.h"): '#include "runtime/peer.h"\n',
    }
    assert violations(cpp_arrows(files), layers("C++"), Path.as_posix) == [
        "ops_src/base/error.cc imports ops_src/runtime/peer.h: base may not import runtime"
    ]
    assert len(circle(cpp_arrows(files))) == 3


def test_an_include_by_way_of_the_parent_is_seen():
    files = {Path("ops_src/base/error.cc"): '#include "../runtime/peer.h"\n', Path("ops_src/runtime/peer.h"): ""}
    assert len(violations(cpp_arrows(files), layers("C++"), Path.as_posix)) == 1


def test_a_computed_import_is_seen():
    files = {Path("ms_kungfu/cluster.py"): "import_module(f'ms_kungfu.{name}')", Path("a.py"): "import_module('x')"}
    assert computing(files) == [Path("ms_kungfu/cluster.py")]


def test_a_row_can_only_name_rows_above_it():
    page = "### X\n| layer | files | what | may |\n| a | `a.py` | - | b |\n| b | `b.py` | - | - |"
    with pytest.raises(AssertionError, match="don't stand above"):
        layers("X", page)


def launcher_imports(package):
    """The modules of the launcher that a file of this package of it names, by file."""
    for path in sorted((ROOT / "ms_kungfu/launcher" / package).glob("*.py")):
        for node in imports(path.read_text(encoding="utf-8")):
            if isinstance(node, ast.ImportFrom) and node.module:
                yield from ((path.name, f"{node.module}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((path.name, alias.name) for alias in node.names)


@pytest.mark.parametrize(
    ("package", "others"), [("controller", ["agent"]), ("agent", ["controller"]), ("state", ["agent", "controller"])]
)
def test_controller_and_agent_know_each_other_by_messages_only(package, others):
    named = list(launcher_imports(package))
    assert len(named) > 20
    assert [
        (path, module) for path, module in named for other in others if f"ms_kungfu.launcher.{other}." in module
    ] == []
