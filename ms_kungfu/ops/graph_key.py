"""Compute a key of everything on which a compiled graph depends.

MindSpore compiles a cell from its Python objects. The key is a hash over these objects. So if two processes compute the
same key, they would compile the same graph.

1. The key covers each object that the cell reaches: attributes, elements, classes, and of functions the code, closure,
   defaults and globals. It also covers the functions' files, because MindSpore reads their text.
2. Code of MindSpore, NumPy, ms_kungfu and the standard library isn't covered, but the versions of these are.
3. Of a Parameter, the key covers what the compiler uses. It doesn't cover the values, which are inputs of the graph.
4. If an object is of a kind that this module can't read, there is no key.
5. If the compiler calls a function that returns the time, a random number or the worker's rank, no object contains
   this value, so the key doesn't cover it.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import os
import platform
import sys
import sysconfig
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.common import dtype as mstype

import ms_kungfu
from ms_kungfu._version import VERSION

_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis), type(NotImplemented))
_KNOWN = {"mindspore", "numpy", "ms_kungfu", *sys.stdlib_module_names} - {"__main__"}
_FOLDERS = tuple(
    str(Path(path)) + os.sep
    for path in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")),
        *(str(Path(str(module.__file__)).parent) for module in (ms, np, ms_kungfu)),
    )
)
_BASES = (int, float, complex, str, bytes)
_OF_THE_INTERPRETER = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType,
    types.MemberDescriptorType, types.GetSetDescriptorType,
)  # fmt: skip
_MOST_WORDS = 500_000  # takes half a second; LeNet's training step has 7,000
_MOST_BYTES = 256 << 20
# Attributes of a Cell that differ between processes, and that the compiler doesn't use.
_OF_THE_PROCESS = {
    "_create_time", "arguments_key", "_compile_cache", "_phase_cache", "_compile_phase", "_exist_objs", "_exist_names",
    "_compiled", "_is_check_and_refresh", "_init_flag", "_id", "compile_phase", "current_phase", "kungfu_sharded",
}  # fmt: skip
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
def _is_known(module: str | None) -> bool:
    """Return whether the module belongs to a package that the key covers by its version only."""
    name = (module or "").partition(".")[0]
    file = getattr(sys.modules.get(name), "__file__", None)  # None for a module that is part of the interpreter
    return name in _KNOWN and (file is None or file.startswith(_FOLDERS))


@functools.cache
def _file(name: str) -> bytes:
    try:
        with open(name, "rb") as file:
            return hashlib.blake2b(file.read()).digest()
    except OSError as error:
        raise NoKey(f"{name}: {error.strerror}") from None


class _Walk:
    """Hashes objects, each once."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=20)
        self._seen: dict[int, tuple[int, Any]] = {}  # the objects, so that no other object gets the same id
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
        if isinstance(value, (list, tuple, dict, set, frozenset, *_BASES, types.FunctionType)):
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
            self.add(value.value)
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
            self.put(value.__name__)
            if not _is_known(value.__name__):
                self.put(_file(str(getattr(value, "__file__", None))))
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
            self.put(value.__qualname__)
            owner = getattr(value, "__self__", None)  # of a bound method, its object
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
            raise NoKey("the cell holds too large arrays")
        self.put(str(value.dtype), str(value.shape))
        self._hash.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)

    def _add_parameter(self, value: Any) -> None:
        self.put(value.name, str(value.dtype), str(value.shape), str(value.requires_grad))
        self.put(str(value.layerwise_parallel), str(value.parallel_optimizer), str(value.comm_fusion))

    def _add_function(self, value: types.FunctionType) -> None:
        self.put(value.__module__ or "", value.__qualname__)
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or ()))
        if _is_known(value.__module__):
            cells.pop("hash_obj", None)  # the time at which `mindspore.jit` was called
        self._add_each((value.__defaults__, value.__kwdefaults__))
        for name, cell in cells.items():
            self.put(name)
            with contextlib.suppress(ValueError):  # the variable has no value yet
                self.add(cell.cell_contents)
        if not _is_known(value.__module__):
            self.put(_file(value.__code__.co_filename))
            self._add_globals(value.__globals__, self._add_code(value.__code__))

    def _add_code(self, code: types.CodeType) -> set[str]:
        """Add a function's code. Return the names that it and its inner functions use."""
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

    def _add_globals(self, scope: Mapping[str, Any], names: set[str]) -> None:
        for name in sorted(names & scope.keys()):
            value = scope[name]
            self.put(name)
            self.add(value)
            if isinstance(value, types.ModuleType) and _is_known(value.__name__):
                # The program may have replaced a function of the package.
                own = {each: vars(value)[each] for each in names & vars(value).keys()}
                self._add_items(
                    {each: function for each, function in sorted(own.items()) if not _is_of_known(function)}
                )
            elif isinstance(value, types.ModuleType):
                self._add_globals(vars(value), names - {name})

    def _add_class(self, value: type) -> None:
        self.put(value.__module__, value.__qualname__)
        if _is_known(value.__module__):
            return
        self._add_each(value.__bases__)
        for name, attribute in vars(value).items():
            if name not in ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__"):
                self.put(name)
                self.add(attribute)

    def _add_object(self, value: Any) -> None:
        kind = type(value)
        self._add_class(kind)
        if isinstance(value, ms.ops.Primitive):
            self.put(value.name)
            self._add_items(dict(value.attrs))
        if not self._add_attributes(value) and not isinstance(value, _BASES):
            raise NoKey(f"an object of the class {kind.__module__}.{kind.__qualname__}")

    def _add_attributes(self, value: Any) -> bool:
        """Add the attributes of an object. Return False if the class has neither attributes nor slots."""
        slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
        for name in slots:
            if hasattr(value, name):
                self.put(name)
                self.add(getattr(value, name))
        for name, attribute in getattr(value, "__dict__", {}).items():
            if not (isinstance(value, nn.Cell) and name in _OF_THE_PROCESS):
                self.put(name)
                self.add(attribute)
        self.put("end")
        return bool(slots) or hasattr(value, "__dict__")


def _slots(kind: type) -> list[str]:
    names = vars(kind).get("__slots__", ())
    return [name for name in ((names,) if isinstance(names, str) else names) if name not in ("__dict__", "__weakref__")]


def _is_of_known(value: Any) -> bool:
    return not isinstance(value, (types.FunctionType, type)) or _is_known(value.__module__)
