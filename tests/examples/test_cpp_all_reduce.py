"""The C ABI as others get it: the headers that come with the package, and the example in C++ that all-reduces."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ms_kungfu import _core, c_api
from tests.conftest import launcher

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "cpp-all-reduce"
INSTALLED = Path(_core.__file__).parent


def flags(capsys, which):
    assert c_api.main([which]) == 0
    return capsys.readouterr().out.split()


def run(*words, **options):
    done = subprocess.run(list(map(str, words)), text=True, capture_output=True, timeout=120, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_headers_come_with_the_package_and_are_c_and_cpp(capsys, tmp_path):
    headers = sorted((ROOT / "ops_src/include").rglob("*.h"))
    assert len(headers) >= 3
    for header in headers:
        installed = INSTALLED / "include" / header.relative_to(ROOT / "ops_src/include")
        assert installed.read_bytes() == header.read_bytes(), "install the package again"
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    text = "".join(f"#include <kungfu/{header.name}>\n" for header in headers)
    for language, standard in (("c", "c99"), ("c++", "c++11")):
        source = tmp_path / "all.txt"
        source.write_text(text)
        run(compiler, "-x", language, f"-std={standard}", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
            *flags(capsys, "--includes"), source)  # fmt: skip


def test_c_program_links_the_runtime_with_the_printed_flags(capsys, tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source = tmp_path / "alone.c"
    source.write_text("#include <kungfu/c_api.h>\nint main(void) { return (int)kf_size() + 10 * (int)kf_rank(); }\n")
    run(compiler, *flags(capsys, "--includes"), source, "-o", tmp_path / "alone", *flags(capsys, "--libs"))
    assert subprocess.run([tmp_path / "alone"], timeout=60).returncode == 1  # a cluster of one


def test_the_example_sums_over_the_workers(tmp_path):
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("there is no CMake or no C++ compiler")
    if not list(Path(sysconfig.get_config_var("LIBDIR")).rglob("libpython*")):
        pytest.skip("there is no library of Python's to link")
    where = run(sys.executable, "-m", "ms_kungfu.c_api", "--cmakedir").strip()
    options = [f"-DPython_EXECUTABLE={sys.executable}", f"-Dms_kungfu_DIR={where}"]
    run("cmake", "-S", EXAMPLE, "-B", tmp_path, *options)
    run("cmake", "--build", tmp_path)
    output = run(launcher(), "-q", "-np", 3, tmp_path / "all_reduce")
    assert sorted(re.findall(r"^rank .*", output, re.MULTILINE)) == [
        f"rank {rank} of 3: sum 6, ranks 3, mean 1" for rank in range(3)
    ]
    assert run(tmp_path / "all_reduce") == "rank 0 of 1: sum 1, ranks 1, mean 0\n"
