"""Workers share compiled graphs: `ms_kungfu.ops.graph_key` and `ms_kungfu.ops.graph_store`."""

from __future__ import annotations

import collections
import datetime
import importlib.util
import os
import subprocess
import sys
import threading
import types
from pathlib import Path
from types import ModuleType
from typing import Any, Callable

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from ms_kungfu.ops import graph_key

PROGRAM = Path(__file__).with_name("programs") / "shared_graph.py"
SOURCE = """
import dataclasses
import mindspore as ms
from mindspore import nn, ops
import {helper}

SCALE = 2.0

class Options:
    slope = 0.5

class Slotted:
    __slots__ = ["rate"]

    def __init__(self, rate):
        self.rate = rate

class Name(str):
    pass

@dataclasses.dataclass
class Settings:
    width: int = 3

def outer(bias):
    def inner(x):
        return x + bias
    return inner

class Net(nn.Cell):
    power = 3

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 2, weight_init="ones", bias_init="zeros")
        self.add = outer(1.0)
        self.table = ms.Tensor([1.0, 2.0])
        self.options = Options()
        self.slotted = Slotted(1)
        self.name_of_it = Name("a")
        self.settings = Settings()
        self.names = {{"first": [1, 2]}}

    def construct(self, x):
        return ops.relu(self.add(self.dense(x) * SCALE + {helper}.OFFSET) ** self.power) * self.table
"""


class Program:
    """A program of two modules, which each test changes in its own way."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._made = folder, 0
        self.source, self.columns = SOURCE, [ms.Tensor(np.ones((5, 4), np.float32))]
        self.change: Callable[[Any, ModuleType, ModuleType], None] = lambda net, main, helper: None

    def _load(self, name: str, text: str) -> ModuleType:
        path = self._folder / f"{name}.py"
        path.write_text(text)
        graph_key._file.cache_clear()
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        sys.dont_write_bytecode = True
        spec.loader.exec_module(module)
        return module

    def key(self) -> str:
        importlib.invalidate_caches()
        helper = self._load("graph_key_helper", "OFFSET = 1.0")
        main = self._load("graph_key_main", self.source.format(helper="graph_key_helper"))
        net = main.Net()
        self.change(net, main, helper)
        return graph_key.key_of(net, self.columns)


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


def test_equal_programs_have_equal_keys(program: Program) -> None:
    assert program.key() == program.key()


def other_attribute(net: Any, main: ModuleType, helper: ModuleType) -> None:
    net.names["first"].append(3)


def other_tensor(net: Any, main: ModuleType, helper: ModuleType) -> None:
    net.table = ms.Tensor([1.0, 3.0])


def other_closure(net: Any, main: ModuleType, helper: ModuleType) -> None:
    net.add = main.outer(2.0)


def other_global(net: Any, main: ModuleType, helper: ModuleType) -> None:
    main.SCALE = 3.0  # type: ignore[attr-defined]


def other_value_in_another_module(net: Any, main: ModuleType, helper: ModuleType) -> None:
    helper.OFFSET = 2.0  # type: ignore[attr-defined]


def other_class_attribute(net: Any, main: ModuleType, helper: ModuleType) -> None:
    main.Options.slope = 0.25


def other_attribute_of_the_cell_class(net: Any, main: ModuleType, helper: ModuleType) -> None:
    main.Net.power = 2


def other_slot(net: Any, main: ModuleType, helper: ModuleType) -> None:
    net.slotted.rate = 2


def other_value_in_a_dataclass(net: Any, main: ModuleType, helper: ModuleType) -> None:
    net.settings.width = 4


def other_text_of_a_derived_class(net: Any, main: ModuleType, helper: ModuleType) -> None:
    net.name_of_it = main.Name("b")


def other_function_in_a_known_package(net: Any, main: ModuleType, helper: ModuleType) -> None:
    main.ops = ModuleType("mindspore.ops")  # type: ignore[attr-defined]
    vars(main.ops).update(vars(ms.ops), relu=main.outer(1.0))  # type: ignore[attr-defined]


def frozen_parameter(net: Any, main: ModuleType, helper: ModuleType) -> None:
    net.dense.weight.requires_grad = False


def fused_parameter(net: Any, main: ModuleType, helper: ModuleType) -> None:
    net.set_comm_fusion(2)


def other_mode(net: Any, main: ModuleType, helper: ModuleType) -> None:
    net.set_train()


def other_precision(net: Any, main: ModuleType, helper: ModuleType) -> None:
    net.to_float(ms.float16)


@pytest.mark.parametrize(
    "change",
    [
        other_attribute, other_tensor, other_closure, other_global, other_value_in_another_module,
        other_class_attribute, other_attribute_of_the_cell_class, other_slot, other_text_of_a_derived_class,
        other_value_in_a_dataclass,
        other_function_in_a_known_package, frozen_parameter, fused_parameter, other_mode, other_precision,
    ],
)  # fmt: skip
def test_key_depends_on_what_the_compiler_reads(program: Program, change: Callable[..., None]) -> None:
    before = program.key()
    program.change = change
    assert program.key() != before


def test_key_depends_on_the_text_of_the_program(program: Program) -> None:
    before = program.key()
    program.source = program.source.replace("ops.relu", "ops.abs")
    changed = program.key()
    program.source += "# MindSpore reads comments, too\n"
    assert len({before, changed, program.key()}) == 3


@pytest.mark.parametrize(
    "text",
    [
        "kf.current_cluster_size()", "float(os.environ['SCALE'])", "getattr({helper}, 'OFFSET')", "time.time()",
        "self._id",
    ],
)  # fmt: skip
def test_program_that_names_what_may_differ_has_no_key(program: Program, text: str) -> None:
    program.source = "import os, time\nimport ms_kungfu as kf\n" + program.source.replace("SCALE +", f"{text} +")
    with pytest.raises(graph_key.NoKey):
        program.key()


def replaced_method_of_a_known_class(net: Any, main: ModuleType, helper: ModuleType) -> None:
    def construct(self, x):  # type: ignore[no-untyped-def]
        return x

    net.activation = nn.ReLU()
    nn.ReLU.construct = construct


def test_key_depends_on_replaced_methods(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    program.change = lambda net, main, helper: setattr(net, "activation", nn.ReLU())
    before = program.key()
    monkeypatch.setattr(nn.ReLU, "construct", nn.ReLU.construct)  # restores it
    program.change = replaced_method_of_a_known_class
    assert program.key() != before


def test_key_depends_on_classes_that_are_made_by_a_call(program: Program) -> None:
    keys = set()
    for slope in (1, 2):
        made = types.new_class("Made", (nn.Cell,), {}, lambda scope, slope=slope: scope.update(slope=slope))
        program.change = lambda net, main, helper, made=made: setattr(net, "made", made())
        keys.add(program.key())
    assert len(keys) == 2


def test_key_depends_on_private_slots(program: Program) -> None:
    program.source = program.source.replace('"rate"', '"__rate"').replace("self.rate", "self.__rate")
    before = program.key()
    program.change = lambda net, main, helper: setattr(net.slotted, "_Slotted__rate", 5)
    assert program.key() != before


def test_value_in_a_module_with_the_same_name_is_covered(program: Program) -> None:
    program.source = program.source.replace("{helper}.OFFSET", "{helper}.{helper}")
    program.change = lambda net, main, helper: setattr(helper, "graph_key_helper", 1.0)
    before = program.key()
    program.change = lambda net, main, helper: setattr(helper, "graph_key_helper", 2.0)
    assert program.key() != before


@pytest.mark.parametrize("column", [np.ones((6, 4), np.float32), np.ones((5, 4), np.float16)])
def test_key_depends_on_shapes_and_dtypes(program: Program, column: Any) -> None:
    before = program.key()
    program.columns = [ms.Tensor(column)]
    assert program.key() != before


def test_key_does_not_depend_on_weights(program: Program) -> None:
    before = program.key()
    program.change = lambda net, main, helper: net.dense.weight.set_data(ms.Tensor(np.zeros((2, 4), np.float32)))
    assert program.key() == before


def test_key_depends_on_the_settings_of_mindspore(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    before = program.key()
    monkeypatch.setenv("MS_DEV_EXAMPLE", "1")
    assert program.key() != before


class Late(collections.deque):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    "attribute",
    [
        threading.Lock(), iter([1]), {object()}, np.array([object()]), Late([1]), datetime.timedelta(1),
        ModuleType("own"), np.random.default_rng(1),
        ms.CSRTensor(ms.Tensor([0, 1]), ms.Tensor([0]), ms.Tensor([1.0]), (1, 1)),
    ],
)  # fmt: skip
def test_unreadable_object_means_no_key(attribute: Any) -> None:
    cell = nn.Cell()
    cell.other = attribute
    with pytest.raises(graph_key.NoKey):
        graph_key.key_of(cell, [])


def test_installed_packages_are_read(tmp_path: Path) -> None:
    standard = Path(threading.__file__)
    assert graph_key._is_known_file(str(standard))
    assert not graph_key._is_known_file(str(standard.parent / "site-packages" / "package" / "part.py"))
    assert not graph_key._is_known_file(str(tmp_path / "threading.py"))
    assert graph_key._is_known_file(str(ms.__file__))


def test_module_with_the_name_of_a_standard_module_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for text in ("def scale(x): return x * 2", "def scale(x): return x * 3"):
        path = tmp_path / "profile.py"
        path.write_text(text)
        graph_key._file.cache_clear()
        graph_key._is_known.cache_clear()
        spec = importlib.util.spec_from_file_location("profile", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "profile", module)
        spec.loader.exec_module(module)
        cell = nn.Cell()
        cell.function = module.scale
        keys.append(graph_key.key_of(cell, []))
    graph_key._is_known.cache_clear()
    assert keys[0] != keys[1]


@pytest.mark.parametrize("attribute", [np.zeros(300 << 20, np.uint8), [[each] for each in range(600_000)]])
def test_cell_that_holds_very_much_has_no_key(attribute: Any) -> None:
    cell = nn.Cell()
    cell.other = attribute
    with pytest.raises(graph_key.NoKey, match="too"):
        graph_key.key_of(cell, [])


def run(folder: Path, factor: int = 2, rows: int = 4, may_share: str = "yes", *holder: str) -> tuple[str, float, str]:
    environment = {**os.environ, "KUNGFU_GRAPHS": str(folder), "PYTHONHASHSEED": "random"}
    found = subprocess.run(
        [sys.executable, str(PROGRAM), str(factor), str(rows), may_share, *holder],
        env=environment, capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    what, result, _ = found.stdout.split()
    return what, float(result), found.stderr


def test_graph_is_read_only_where_it_is_right(tmp_path: Path) -> None:
    right = 20 * 3 * 4 * 2 + 4.0
    assert run(tmp_path, may_share="no")[:2] == ("compiled", right)
    assert list(tmp_path.glob("*")) == list(tmp_path.glob("worker-*"))
    what, result, logged = run(tmp_path)
    assert (what, result) == ("compiled", right)
    assert "graph written" in logged
    what, result, logged = run(tmp_path)
    assert (what, result) == ("read", right)
    assert "correctness risks" not in logged  # the cache's warning
    assert run(tmp_path, factor=3)[:2] == ("compiled", 20 * 3 * 4 * 3 + 4.0)
    assert run(tmp_path, rows=5)[:2] == ("compiled", 20 * 3 * 5 * 2 + 5.0)


def test_damaged_graph_is_compiled(tmp_path: Path) -> None:
    run(tmp_path)
    (graph,) = [path for path in tmp_path.iterdir() if path.is_file() and path.suffix == ""]
    graph.chmod(0o600)
    graph.write_bytes(graph.read_bytes()[:1000])
    assert run(tmp_path)[:2] == ("compiled", 20 * 3 * 4 * 2 + 4.0)


def test_missing_folder_changes_nothing(tmp_path: Path) -> None:
    assert run(tmp_path / "none")[:2] == ("compiled", 20 * 3 * 4 * 2 + 4.0)


def test_graph_with_parameters_that_the_cell_does_not_hold_is_not_shared(tmp_path: Path) -> None:
    for _ in range(2):
        what, result, logged = run(tmp_path, 2, 4, "yes", "function")
        assert (what, result) == ("compiled", 20 * 3 * 4 * 2 + 4.0)
        assert "graph written" not in logged


def test_graph_that_has_other_parameters_is_dropped(tmp_path: Path) -> None:
    run(tmp_path)
    what, result, logged = run(tmp_path, 2, 4, "yes", "unknown")
    assert (what, result) == ("compiled", 20 * 3 * 4 * 2 + 4.0)
    assert "a graph has other Parameters than the cell" in logged
