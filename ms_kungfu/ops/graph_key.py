"""Compute a key of everything on which a compiled graph depends.

MindSpore compiles a cell from the cell's Python objects. The key is a hash over these objects, so processes with equal
keys would compile equal graphs. If this module can't read an object, the cell has no key, and its graph isn't shared.

1. The key covers each object that is reachable from the cell: attributes, elements and classes. Of a function, the key
   covers the code, closure, defaults, globals, and file (MindSpore reads the file). Objects of other kinds can't be
   read.
2. Code in the folders of MindSpore, NumPy, ms_kungfu and the standard library isn't covered, but these packages'
   versions are. Functions that the program has put into these packages' classes and modules are covered.
3. The key covers the properties of a Parameter that the compiler uses, but not its values, which are inputs of the
   graph.
4. The cell has no key if a function of the program uses a name in `_DIFFER` or `_BY_TEXT`. The values of `_DIFFER` may
   differ between workers: rank, environment, time, random numbers, files. The functions of `_BY_TEXT` find variables
   whose names aren't in the code. Only ``__init__`` may use these names, because the key covers the attributes that
   ``__init__`` sets.
"""

from __future__ import annotations

import abc
import argparse
import collections
import contextlib
import dataclasses
import enum
import functools
import hashlib
import inspect
import logging
import os
import platform
import sys
import sysconfig
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.common import dtype as mstype

from ms_kungfu._version import VERSION
from ms_kungfu.ops._shards import SumShards

_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis), type(NotImplemented))
_KNOWN = {"mindspore", "numpy", "ms_kungfu", *sys.stdlib_module_names} - {"__main__"}


def _folders(*paths: str | Path | None) -> tuple[str, ...]:
    found = [Path(path) for path in paths if path is not None]
    return tuple(str(path) + os.sep for each in found for path in (each, each.resolve()))


_STANDARD = _folders(sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_PACKAGES = _folders(Path(__file__).parents[1], *(Path(str(module.__file__)).parent for module in (ms, np)))
_BASES = (int, float, complex, str, bytes)
_CONTAINERS = (list, tuple, dict, set, frozenset)
# An object's class may be derived from these classes, which aren't part of the program.
_PYTHON_BASES = {
    object, abc.ABC, argparse.Namespace, collections.OrderedDict, enum.Enum, enum.IntEnum, types.SimpleNamespace,
    typing.Generic, typing.Protocol, inspect.Signature, inspect.Parameter, dataclasses.Field, type(dataclasses.MISSING),
    type(dataclasses._FIELD), dataclasses._DataclassParams, *_BASES, *_CONTAINERS,  # type: ignore[attr-defined]
}  # fmt: skip
_C_BASES = {
    "Cell_", "Primitive_", "PrimitiveFunction_", "MultitypeFuncGraph_", "HyperMap_", "HyperMapPy_", "Map_", "MapPy_",
    "GradOperation_", "MetaFuncGraph_", "pybind11_object",
}  # fmt: skip
_HEAP_TYPE, _WORD = 1 << 9, 8  # Py_TPFLAGS_HEAPTYPE, and the size of a pointer
_METACLASSES = {type, abc.ABCMeta, enum.EnumMeta, type(typing.Protocol)}
_OF_THE_INTERPRETER = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType,
    types.MemberDescriptorType, types.GetSetDescriptorType,
)  # fmt: skip
_MOST_WORDS = 500_000  # hashing them takes half a second; LeNet's training step has 7,000
_MOST_BYTES = 256 << 20
# Attributes of a Cell that differ between processes, and that the compiler doesn't use.
_OF_THE_PROCESS = {
    "_create_time", "arguments_key", "_compile_cache", "_phase_cache", "_compile_phase", "_exist_objs", "_exist_names",
    "_compiled", "_is_check_and_refresh", "_init_flag", "_id", "compile_phase", "current_phase", "kungfu_sharded",
}  # fmt: skip
_DIFFER = {
    "current_rank", "current_cluster_size", "current_local_rank", "current_local_size", "cluster_version", "get_rank",
    "get_group_size", "get_local_rank", "get_local_rank_size", "get_seed", "environ", "getenv", "time", "monotonic",
    "perf_counter", "random", "default_rng", "urandom", "uuid4", "getpid", "gethostname", "open", "constexpr",
    "_constexpr",
}  # fmt: skip
_BY_TEXT = {"getattr", "vars", "globals", "locals", "eval", "exec", "__dict__", "__import__", "import_module"}
_CONTEXT = (
    "mode", "device_target", "deterministic", "enable_graph_kernel", "graph_kernel_flags", "jit_level",
    "jit_syntax_level", "max_call_depth", "memory_optimize_level", "op_timeout", "grad_for_scalar",
)  # fmt: skip


class NoKey(Exception):
    """A cell has no key. The message names the object that can't be read."""


def key_of(cell: nn.Cell, columns: Sequence[Any]) -> str:
    """Return the key of the graph of `cell` for inputs like `columns`. Raise NoKey if there is none."""
    walk = _Walk()
    walk.put(VERSION, ms.__version__, np.__version__, platform.python_version())
    walk.put(*(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("MS_")))
    walk.put(*(f"{name}={_setting(name)}" for name in _CONTEXT))
    walk.put(*(f"{column.dtype}{tuple(column.shape)}" for column in columns))
    try:
        for each in (ms.Tensor, ms.Parameter, nn.Cell):
            walk.add(each)
        walk.add(cell)
    except RecursionError:
        raise NoKey("the cell's objects are nested too deeply") from None
    return walk.digest()


def _setting(name: str) -> Any:
    try:
        return ms.get_context(name)
    except (ValueError, RuntimeError, KeyError):  # this MindSpore has no such setting
        return None


@functools.cache
def _is_known_file(name: str) -> bool:
    """Return whether a file belongs to a package for which the key covers only the version."""
    is_standard = name.startswith(_STANDARD) and not {"site-packages", "dist-packages"} & set(Path(name).parts)
    return is_standard or name.startswith(_PACKAGES)


@functools.cache
def _is_known(module: str | None) -> bool:
    """Return whether a module belongs to a package for which the key covers only the version."""
    name = (module or "").partition(".")[0]
    file = getattr(sys.modules.get(name), "__file__", None)  # None for a module that is part of the interpreter
    return name in _KNOWN and (file is None or _is_known_file(file))


def _is_known_function(value: types.FunctionType) -> bool:
    """Return whether the function's code belongs to a package for which the key covers only the version."""
    file = value.__code__.co_filename
    if file.startswith("<"):  # a module that is part of the interpreter, or code that a package has generated
        return _is_known(value.__globals__.get("__name__"))
    return _is_known_file(file)


def _functions_of(kind: type) -> dict[str, types.FunctionType]:
    """Return the functions that are attributes of the class, including those of properties."""
    found = {}
    for name, value in vars(kind).items():
        parts = (value.fget, value.fset, value.fdel) if isinstance(value, property) else (value,)
        for i, part in enumerate(parts):
            function = getattr(part, "__func__", part)
            if isinstance(function, types.FunctionType):
                found[f"{name}.{i}"] = function
    return found


def _is_known_class(kind: type) -> bool:
    """Return whether the class is defined in a package for which the key covers only the version."""
    module = sys.modules.get(kind.__module__)
    if not _is_known(kind.__module__) or module is None:
        return False
    if "<locals>" in kind.__qualname__:  # a function of the package has created the class
        functions = [f for name, f in _functions_of(kind).items() if f.__qualname__.startswith(kind.__qualname__)]
        return bool(functions) and all(map(_is_known_function, functions))
    found: Any = module
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind or kind.__module__ == "mindspore._c_expression"


@functools.cache
def _file(name: str) -> bytes:
    try:
        with open(name, "rb") as file:
            return hashlib.blake2b(file.read()).digest()
    except OSError as error:
        raise NoKey(f"{name}: {error.strerror}") from None


class _Walk:
    """Computes a hash over objects. An object that is reached several times is hashed once."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=20)
        self._seen: dict[int, tuple[int, Any]] = {}  # keeps objects alive, so that no other object gets the same id
        self._words = self._bytes = 0

    def digest(self) -> str:
        return self._hash.hexdigest()

    def put(self, *words: str | bytes) -> None:
        self._words += len(words)
        if self._words > _MOST_WORDS:
            raise NoKey("the cell reaches too many objects")
        for word in words:
            data = word.encode() if isinstance(word, str) else word
            self._hash.update(b"%d:" % len(data))
            self._hash.update(data)

    def add(self, value: Any) -> None:
        if type(value) in _PLAIN:
            self.put(type(value).__name__, repr(value))
            return
        if id(value) in self._seen:
            self.put("seen", str(self._seen[id(value)][0]))
            return
        self._seen[id(value)] = len(self._seen), value
        self.put(type(value).__module__, type(value).__qualname__)
        self._add_new(value)
        for base in _BASES:
            if isinstance(value, base):
                self.put(base.__repr__(value))
        if isinstance(value, (*_CONTAINERS, *_BASES, types.FunctionType)):
            self._add_class(type(value))
            self._add_attributes(value)

    def _add_new(self, value: Any) -> None:
        if isinstance(value, ms.Parameter):
            self._add_parameter(value)
        elif isinstance(value, ms.Tensor):
            self._add_array(value.asnumpy())
        elif isinstance(value, (np.ndarray, np.generic)):
            self._add_array(np.asarray(value))
        elif isinstance(value, (np.dtype, mstype.Type)):
            self.put(str(value))
        elif isinstance(value, enum.Enum):
            self.put(value.name)
            self._add_each((value.value, type(value)))
        elif _is_known(type(value).__module__) and hasattr(type(value), "__members__"):  # an enum of C++
            self.put(str(value))
        elif isinstance(value, (list, tuple)):
            self._add_each(value)
        elif isinstance(value, (set, frozenset)):
            if not all(type(each) in _PLAIN for each in value):
                raise NoKey("a set of objects")
            self._add_each(sorted(value, key=repr))
        elif isinstance(value, (dict, types.MappingProxyType)):
            self._add_items(value)
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, types.ModuleType):
            if not _is_known(value.__name__):
                raise NoKey(f"the module {value.__name__} as a value")
            self.put(value.__name__)
        elif isinstance(value, functools.partial):
            self._add_each((value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            self._add_each((value.__self__, value.__func__))
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, (staticmethod, classmethod)):
            self.add(value.__func__)
        elif isinstance(value, property):
            self._add_each((value.fget, value.fset, value.fdel))
        elif isinstance(value, _OF_THE_INTERPRETER):
            owner = getattr(value, "__self__", None)  # the object of a bound method
            of = getattr(value, "__objclass__", owner)
            self.put(getattr(of, "__name__", "") or "", getattr(value, "__module__", "") or "", value.__qualname__)
            if not isinstance(owner, (types.ModuleType, type)):
                self.add(owner)
        else:
            self._add_object(value)

    def _add_each(self, values: Iterable[Any]) -> None:
        for value in values:
            self.add(value)
        self.put("end")

    def _add_items(self, items: Mapping[Any, Any]) -> None:
        for name, value in items.items():
            self.add(name)
            self.add(value)
        self.put("end")

    def _add_array(self, value: Any) -> None:
        if value.dtype.hasobject:
            raise NoKey("an array of objects")
        self._bytes += value.nbytes
        if self._bytes > _MOST_BYTES:
            raise NoKey("the cell's arrays are too large")
        self.put(str(value.dtype), str(value.shape))
        self._hash.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)

    def _add_parameter(self, value: Any) -> None:
        self.put(value.name, str(value.dtype), str(value.shape), str(value.requires_grad))
        self.put(str(value.layerwise_parallel), str(value.parallel_optimizer), str(value.comm_fusion))

    def _add_function(self, value: types.FunctionType) -> None:
        self.put(value.__module__ or "", value.__qualname__)
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or ()))
        known = _is_known_function(value)
        if known:
            if value.__name__ in _DIFFER:
                raise NoKey(f"the function {value.__qualname__}")
            cells.pop("hash_obj", None)  # the time at which `mindspore.jit` was called
        self._add_each((value.__defaults__, value.__kwdefaults__))
        for name, cell in cells.items():
            self.put(name)
            with contextlib.suppress(ValueError):  # the variable has no value yet
                self.add(cell.cell_contents)
        if known:
            self.put(value.__code__.co_filename, str(value.__code__.co_firstlineno))
            return
        if not value.__code__.co_filename.startswith("<"):  # the compiler can't read the text of generated code
            self.put(_file(value.__code__.co_filename))
        names = self._add_code(value.__code__)
        unsafe = names & (_BY_TEXT | _OF_THE_PROCESS | _DIFFER)
        if unsafe and value.__name__ != "__init__":
            raise NoKey(f"{value.__qualname__} names {min(unsafe)}")
        self._add_globals(value.__globals__, names, set())

    def _add_code(self, code: types.CodeType) -> set[str]:
        """Add a function's code. Return the names that the code and its inner functions use."""
        self.put(code.co_code, str(code.co_firstlineno), *code.co_names, *code.co_varnames)
        names = set(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                names |= self._add_code(constant)
            elif isinstance(constant, frozenset):
                self._add_each(sorted(constant, key=repr))
            else:
                self.add(constant)
        return names

    def _add_globals(self, scope: Mapping[str, Any], names: set[str], within: set[int]) -> None:
        """Add the variables in `scope` with these names. `within`: the modules that contain the scope."""
        for name in sorted(names & scope.keys()):
            value = scope[name]
            self.put(name)
            if not isinstance(value, types.ModuleType):
                self.add(value)
            elif not _is_known(value.__name__):
                self.put(value.__name__, _file(str(getattr(value, "__file__", None))))
                if id(value) not in within:
                    self._add_globals(vars(value), names, within | {id(value)})
            else:
                self.put(value.__name__)
                for each in sorted(names & vars(value).keys()):  # the program may have replaced a function
                    function = vars(value)[each]
                    if isinstance(function, types.FunctionType) and not _is_known_function(function):
                        self.put(each)
                        self.add(function)

    def _add_class(self, value: type) -> None:
        self.put(value.__module__, value.__qualname__)
        if _is_known_class(value):
            for kind in value.__mro__:
                for name, function in _functions_of(kind).items():
                    if not _is_known_function(function) and _is_known_class(kind):  # the program has replaced a method
                        self.put(name)
                        self.add(function)
            return
        if type(value) not in _METACLASSES and type(value).__name__ != "pybind11_type":
            raise NoKey(f"the metaclass of {value.__qualname__}")
        self._add_each(value.__bases__)
        for name, attribute in vars(value).items():
            if name not in ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__"):
                self.put(name)
                self.add(attribute)

    def _add_object(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, logging.Logger):
            return  # no graph depends on a logger
        if isinstance(value, PurePath):
            self.put(str(value))
            return
        for base in kind.__mro__:
            package = base.__module__.partition(".")[0]
            if base.__module__ in ("mindspore._c_expression", "pybind11_builtins"):
                allowed = base.__name__ in _C_BASES
            else:
                allowed = base in _PYTHON_BASES or package in ("mindspore", "ms_kungfu")
                allowed = allowed or (not _is_known_class(base) and _is_python_class(base))
            if not allowed:
                raise NoKey(f"an object of the class {kind.__module__}.{kind.__qualname__}")
        self._add_class(kind)
        if isinstance(value, ms.ops.Primitive):
            self.put(value.name)
            self._add_items(dict(value.attrs))
        if not self._add_attributes(value) and not isinstance(value, _BASES):
            raise NoKey(f"an object of the class {kind.__module__}.{kind.__qualname__}")

    def _add_attributes(self, value: Any) -> bool:
        """Add the attributes of an object to the key. Return False if the class has neither attributes nor slots."""
        slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
        for name in slots:
            if hasattr(value, name):
                self.put(name)
                self.add(getattr(value, name))
        for name, attribute in getattr(value, "__dict__", {}).items():
            of_process = isinstance(value, nn.Cell) and name in _OF_THE_PROCESS
            if not of_process and not (isinstance(value, SumShards) and name == "dtypes"):
                self.put(name)
                self.add(attribute)
        self.put("end")
        return bool(slots) or hasattr(value, "__dict__")


def _is_python_class(kind: type) -> bool:
    """Return whether attributes and slots are the only state that the class adds to its base class."""
    attributes = 2 * _WORD  # __dict__ and __weakref__
    room = 0 if kind.__base__ is None else kind.__base__.__basicsize__ + attributes + _WORD * len(_slots(kind))
    return bool(kind.__flags__ & _HEAP_TYPE) and kind.__basicsize__ <= room


def _slots(kind: type) -> list[str]:
    names = vars(kind).get("__slots__", ())
    found = [
        name for name in ((names,) if isinstance(names, str) else names) if name not in ("__dict__", "__weakref__")
    ]
    private = f"_{kind.__name__.lstrip('_')}"  # Python renames private names
    return [private + name if name.startswith("__") and not name.endswith("__") else name for name in found]
