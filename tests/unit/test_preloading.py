"""Which programs get forked workers (launcher/preloading.py)."""

import os
import sys

import pytest

from ms_kungfu.launcher.preloading import preloading_of

PLAIN = '"""A program."""\nfrom __future__ import annotations\nimport os\nimport numpy as np\nimport mindspore as ms\n'


@pytest.fixture
def decide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(text=PLAIN, words=("python", "train.py"), environ=(), modules=()):
        (tmp_path / "train.py").write_text(text)
        for name, source in dict(modules).items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(source)
        return preloading_of(words, dict(environ))

    return run


if not hasattr(sys, "stdlib_module_names"):
    pytest.skip("Python 3.9 doesn't list its standard library", allow_module_level=True)


@pytest.mark.parametrize(
    "words",
    [
        ["python", "train.py"],
        ["python3", "-u", "train.py", "--epochs", "3"],
        ["/usr/bin/python3.11", "-OO", "-W", "ignore", "-X", "dev", "train.py"],
        ["python", "-m", "train", "-m", "x"],
    ],
)
def test_plain_program_is_preloaded(words, decide, tmp_path):
    found = decide(words=words)
    at = words.index("train" if "train" in words else "train.py")
    assert found is not None
    assert found.program == tuple(words[at:])
    assert found.is_module == (words[at] == "train")
    assert list(found.python) == [word for word in words[:at] if word != "-m"]
    assert found.folder == os.path.realpath(tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        ["bash", "train.py"],
        ["pypy3", "train.py"],
        ["python", "-I", "train.py"],
        ["python", "-c", "import mindspore"],
        ["python", "-um", "train"],
        ["python"],
        ["python", "missing.py"],
        ["python", "."],
        ["python", "-m", "json.tool"],
    ],
)
def test_other_command_is_not_preloaded(words, decide):
    assert decide(words=words) is None


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.environ['GLOG_v'] = '3'\nimport mindspore\n",
        "import torch\nimport mindspore\n",
        "try:\n    import mindspore\nexcept ImportError:\n    pass\n",
        "from . import part\nimport mindspore\n",
        "import numpy\n",
        "import mindspore as\n",
        "def main():\n    import mindspore\n",
    ],
)
def test_program_that_may_matter_to_the_import_is_not_preloaded(text, decide):
    assert decide(text) is None


@pytest.mark.parametrize("name", ["GLOG_log_dir", "OMP_PROC_BIND", "PYTHONSAFEPATH"])
def test_environment_in_which_the_import_matters_is_not_preloaded(name, decide):
    assert decide(environ={name: "1"}) is None


def test_own_modules_before_mindspore_are_read(decide):
    text = "import part\nfrom lib.deep import thing\nimport mindspore\n"
    harmless = {"part.py": "import argparse\n", "lib/__init__.py": "", "lib/deep.py": "import part\nthing = 1\n"}
    assert decide(text, modules=harmless) is not None
    for name, source in (
        ("part.py", "import os\nos.environ['A'] = 'b'\n"),
        ("lib/deep.py", "import torch\n"),
        ("lib/__init__.py", "import ctypes\nctypes.CDLL(None)\n"),
    ):
        assert decide(text, modules={**harmless, name: source}) is None, name


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    import torch\nexcept ImportError:\n    pass\n",
        "from . import other\n",
        "from lib import *\n",
        "import importlib\nimportlib.import_module('torch')\n",
        "import sys\nhere = sys.path\n",
        "if __name__ == '__main__':\n    pass\nelse:\n    import torch\n",
        "from os import environ\n",
        "import ctypes\nlibrary = ctypes.cdll.LoadLibrary('x')\n",
        "import logging\nlogging.setLoggerClass(logging.Logger)\n",
        "import warnings\nwarnings.filterwarnings('ignore')\n",
    ],
)
def test_own_module_with_an_import_that_cannot_be_read_forbids_it(source, decide):
    assert decide("import part\nimport mindspore\n", modules={"part.py": source}) is None


def test_words_in_a_docstring_do_not_matter(decide):
    own = {"part.py": '"""Runs in an environment of its own, with warnings."""\n# os.environ\n'}
    assert decide("import part\nimport mindspore\n", modules=own) is not None


def test_import_in_a_function_does_not_matter(decide):
    own = {"part.py": "def draw():\n    import torch\nif __name__ == '__main__':\n    draw()\n"}
    assert decide("import part\nimport mindspore\n", modules=own) is not None


def test_package_of_a_module_runs_before_it(decide):
    words = ["python", "-m", "lib.train"]
    assert decide(words=words, modules={"lib/__init__.py": "", "lib/train.py": PLAIN}) is not None
    assert decide(words=words, modules={"lib/__init__.py": "import os\nos.environ['A'] = 'b'\n"}) is None


def test_package_hides_a_module_of_its_name(decide):
    assert decide(words=["python", "-m", "train"], modules={"train/__main__.py": ""}) is None


def test_own_module_hides_a_module_of_the_library(decide):
    assert decide("import queue\nimport mindspore\n") is not None
    own = {"queue.py": "import resource\nresource.setrlimit\n"}
    assert decide("import queue\nimport mindspore\n", modules=own) is None


def test_program_is_free_after_its_import_of_mindspore(decide):
    assert decide("import mindspore\nimport torch\nimport os\nos.environ['A'] = 'b'\n") is not None
