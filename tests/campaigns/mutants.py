"""Breaks the code in one place at a time and runs the tests that should see it: ``python -m tests.campaigns mutants``.

    python -m tests.campaigns.mutants --only NAME

The mutants are in `mutant_table.py`. They are applied in a private copy of the checkout (build/mutants), one after the
other; each has to be caught by one of the tests that it names, all of which belong to the quick suite and pass without
it. The last line has the counts; the exit status is 1 if a mutant survives.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "mutants"
COPY = FOLDER / "checkout"
BUILD = COPY / "build" / "mutants"
SITE = FOLDER / "site"
LIMIT_S = 120  # of a mutant's tests, beyond what all tests take without it: one that hangs is caught
# An editable installation finds its own checkout before PYTHONPATH.
SITECUSTOMIZE = """import sys
sys.meta_path[:] = [each for each in sys.meta_path if type(each).__name__ != "ScikitBuildRedirectingFinder"]
"""


class WrongMutantError(Exception):
    """The table doesn't fit the code or the tests."""


@dataclass(frozen=True)
class Mutant:
    """`tests` are pytest's (FILE or FILE::TEST) or, after ``cpp:``, patterns of GoogleTest."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied_to(self, text: str) -> str:
        if (count := text.count(self.old)) != 1:
            raise WrongMutantError(f"mutant {self.name}: its old text occurs {count} times in {self.file}, not once")
        return text.replace(self.old, self.new)


def of_cpp(tests: Iterable[str]) -> list[str]:
    return [test[len("cpp:") :] for test in tests if test.startswith("cpp:")]


def of_pytest(tests: Iterable[str]) -> list[str]:
    return [test for test in tests if not test.startswith("cpp:")]


def run(words: Sequence[str], limit_s: float | None = None) -> tuple[int | None, str]:
    """The exit status, None after the limit, and the output of a command in the copy; nothing of it is left."""
    paths = os.pathsep.join([str(SITE), str(COPY)])
    output = FOLDER / "output"
    with output.open("w") as file:
        process = subprocess.Popen(
            words, cwd=COPY, env={**os.environ, "PYTHONPATH": paths}, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        status: int | None = None
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    return status, output.read_text(errors="replace")


def copy_checkout() -> None:
    """Bring the copy up to date; what hasn't changed keeps its time, so that little is compiled again."""
    words = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        source, copy = ROOT / name, COPY / name
        if not source.is_file() or (copy.is_file() and source.read_bytes() == copy.read_bytes()):
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
        shutil.copymode(source, copy)
    SITE.mkdir(exist_ok=True)
    (SITE / "sitecustomize.py").write_text(SITECUSTOMIZE)


def configure() -> None:
    """As tests/conftest.py does, but one file at a time, with the Python module and the kernels for the CPU."""
    options = ["-DKUNGFU_BUILD_TESTS=ON", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"]
    options += ["-DCMAKE_LINK_DEPENDS_NO_SHARED=ON"]
    found = subprocess.run(
        [sys.executable, "-m", "pybind11", "--cmakedir"], stdout=subprocess.PIPE, text=True, check=True
    )
    options += [f"-Dpybind11_DIR={found.stdout.strip()}", f"-DPython_EXECUTABLE={sys.executable}"]
    if shutil.which("ccache"):
        options += ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"]
    status, output = run(["cmake", "-G", "Ninja", "-S", str(COPY), "-B", str(BUILD), *options])
    if status != 0:
        raise SystemExit(output)


def build(what: str) -> None:
    targets = ["kungfu_tests", "_core", "libkungfu_ms_cpu.so"]
    jobs = str(os.cpu_count() or 1)
    status, output = run(["cmake", "--build", str(BUILD), "--parallel", jobs, "--target", *targets])
    if status != 0:
        raise WrongMutantError(f"{what} doesn't compile:\n{output[-4000:]}")


def link_build() -> None:
    """Have the copy's package use the copy's build."""
    version = subprocess.run(
        [sys.executable, "-c", "import importlib.metadata as m; print(m.version('mindspore'))"],
        stdout=subprocess.PIPE, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    package = COPY / "ms_kungfu"
    (package / "plugins" / version).mkdir(parents=True, exist_ok=True)
    runtime = BUILD / "ops_src" / "libkungfu_runtime.so"
    for built in [*(BUILD / "ops_src").glob("_core*.so"), runtime, BUILD / "kernels" / "cpu" / "libkungfu_ms_cpu.so"]:
        link = (package / "plugins" / version if "kernels" in built.parts else package) / built.name
        link.unlink(missing_ok=True)
        link.symlink_to(built)


def gtest(patterns: Sequence[str], *words: str) -> list[str]:
    chosen = f"--gtest_filter={':'.join(patterns)}:-*Time.*"
    return [str(BUILD / "tests" / "cpp" / "kungfu_tests"), chosen, *words]


def pytest(tests: Sequence[str], *words: str) -> list[str]:
    # The quick suite's; the marks also leave out what is named by its own name.
    options = ["-p", "no:cacheprovider", "-n", "0", "-q", "--tb=short", "-m", "not timing and not long", *words]
    return [sys.executable, "-m", "pytest", *options, *tests]


def check_unbroken(mutants: Sequence[Mutant]) -> float:
    """That each named test exists, belongs to the quick suite and passes without a mutant. Returns the seconds."""
    start = time.monotonic()
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    passed: set[str] = set()
    for words, pattern in (
        (gtest(of_cpp(tests)), r"^\[       OK \] ([\w./]+)"),
        (pytest(of_pytest(tests), "-rA"), r"^PASSED (\S+)"),
    ):
        if not (of_cpp(tests) if words[0] != sys.executable else of_pytest(tests)):
            continue
        status, output = run(words)
        if status != 0:
            raise WrongMutantError(f"without a mutant {' '.join(words)} exits with {status}:\n{output[-6000:]}")
        passed.update(re.findall(pattern, output, re.MULTILINE))
    for test in of_cpp(tests):
        if not fnmatch.filter(passed, test):
            raise WrongMutantError(f"cpp:{test} selects no test of the quick suite")
    for test in of_pytest(tests):
        if not any(each == test or each.startswith((f"{test}::", f"{test}[")) for each in passed):
            raise WrongMutantError(f"{test} selects no test of the quick suite")
    return time.monotonic() - start


def catcher(mutant: Mutant, limit_s: float) -> str | None:
    """The first test that fails, None if all pass."""
    if patterns := of_cpp(mutant.tests):
        status, output = run(gtest(patterns, "--gtest_fail_fast"), limit_s)
        if status != 0:
            failed = re.findall(r"^\[  FAILED  \] ([\w./]+)", output, re.MULTILINE)
            begun = re.findall(r"^\[ RUN      \] ([\w./]+)", output, re.MULTILINE)
            how = "" if failed else f" ({'hangs' if status is None else 'crashes'})"
            return f"{(failed[:1] or begun[-1:] or ['its start'])[0]}{how}"
    if tests := of_pytest(mutant.tests):
        status, output = run(pytest(tests, "-x", "-rfE"), limit_s)
        if status != 0:
            failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output, re.MULTILINE)
            return failed[0] if failed else f"{tests[0]} ({'hangs' if status is None else f'exit status {status}'})"
    return None


def play(mutant: Mutant, limit_s: float) -> bool:
    """Whether it is caught."""
    path = COPY / mutant.file
    compiled = path.suffix in (".cc", ".h")
    original = path.read_text()
    start = time.monotonic()
    path.write_text(mutant.applied_to(original))
    try:
        if compiled:
            build(f"mutant {mutant.name}")
        caught = catcher(mutant, limit_s)
    finally:
        path.write_text(original)
    found = "SURVIVED" if caught is None else f"caught by {caught}"
    print(f"{mutant.name} ({mutant.file}): {found}, {time.monotonic() - start:.0f} s", flush=True)
    return caught is not None


def main(words: Sequence[str] | None = None) -> int:
    from tests.campaigns.mutant_table import MUTANTS

    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="play this mutant; may be given again")
    args = parser.parse_args(words)
    mutants = [mutant for mutant in MUTANTS if args.only is None or mutant.name in args.only]
    if unknown := {*(args.only or ())} - {mutant.name for mutant in mutants}:
        parser.error(
            f"--only {', '.join(sorted(unknown))}: no mutant has that name; {Path(__file__).parent} lists them"
        )
    copy_checkout()
    for mutant in mutants:
        mutant.applied_to((COPY / mutant.file).read_text())
    configure()
    build("the copy")
    link_build()
    limit_s = LIMIT_S + check_unbroken(mutants)
    begun = {path: path.read_bytes() for path in {COPY / mutant.file for mutant in mutants}}
    caught = sum(play(mutant, limit_s) for mutant in mutants)
    assert begun == {path: path.read_bytes() for path in begun}
    print(f"{len(mutants)} mutants: {caught} caught, {len(mutants) - caught} survived")
    return 0 if caught == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
