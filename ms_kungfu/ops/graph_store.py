"""Share compiled graphs among a host's workers, so that later workers needn't compile the same graphs again.

MindSpore's compile cache writes a graph when the compiler's front end has finished the graph, and reads the graph in
another process. Reading takes a fifth of a compilation's time. But the cache identifies a graph only by its number:
each process numbers its graphs in the order of compilation. So the cache may read a graph for other shapes or of
another program. This module switches the cache on for one compilation at a time, and lets the cache find only the graph
with the same key (`graph_key`).

1. During a compilation, the cache's folder contains no graph but the one with the key, and no other thread compiles a
   cell or a jitted function. So no other cell or function gets this graph, even if MindSpore numbers graphs
   differently.
2. All graphs are in the host's folder, in files that are named by key. A file gets its name only when it is complete.
   The launcher's supervisor creates the folder, and removes it when the job ends on the host.
3. If MindSpore can't read or write a graph, the worker compiles as it would without this module.
4. The cache logs a warning in each compilation. So during these compilations, all warnings of the same part of
   MindSpore are off. Rank 0 of a job that starts doesn't use the cache, and logs the other warnings.
5. A graph that MindSpore reads gets only Parameters of the cell. So a graph is neither written nor used if the cell
   calls functions that use other Parameters.
6. After the cache has rejected a graph, it reads no other graph in this process. So a process that has written a graph
   reads none.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable

import mindspore as ms
from mindspore import context
from mindspore._c_expression import ms_ctx_param

from ms_kungfu import env, membership, runtime
from ms_kungfu.errors import KungFuError
from ms_kungfu.ops._executor import EXECUTOR

_log = logging.getLogger(__name__)
_VERSIONS = ("2.10.",)  # with other versions of MindSpore, this module has not been tested
_HASH = "compile_dependency.hash"  # the cache reads a graph only if this file contains the hash of `_DEPENDENCIES`
_DEPENDENCIES = [__file__]  # `graph_key` covers the program's own files
_LEVELS = "_ZN9mindspore25g_ms_submodule_log_levelsE"  # the log levels of MindSpore's parts
_PIPELINE, _ERROR = 16, 3  # SubModuleId and MsLogLevel in MindSpore's utils/log_adapter.h
_one_at_a_time = threading.RLock()


class GraphStore:
    """The compiled graphs of a host's workers. `folder`: the host's folder."""

    def __init__(self, folder: Path) -> None:
        from mindspore.graph import api  # older versions of MindSpore don't have this module

        self._api: Any = api
        self._folder, self.process = folder, os.getpid()  # a child that the program forks doesn't use this object
        self._private = Path(tempfile.mkdtemp(prefix="worker-", dir=folder))  # MindSpore allows one folder per process
        (self._private / "rank_0").mkdir()
        self._cache = self._private / "rank_0" / "graph_cache"
        self._next = 0  # MindSpore's number for the next graph
        library = Path(ms.__file__).with_name("lib") / "libmindspore_core.so"
        self._levels = (ctypes.c_int * (_PIPELINE + 1)).in_dll(ctypes.CDLL(str(library)), _LEVELS)
        EXECUTOR.compile = _alone(EXECUTOR.compile)
        api._JitExecutor.compile = _alone(api._JitExecutor.compile)
        os.register_at_fork(after_in_child=_renew_lock)

    def compile(self, cell: Any, columns: Sequence[Any], may_share: Callable[[], bool]) -> bool:
        """Compile `cell` for inputs like `columns`, or read its graph. Return whether the graph was read."""
        if runtime.current_rank() != 0 or membership.is_joining():
            from ms_kungfu.ops import graph_key

            try:
                key = graph_key.key_of(cell, columns)
                with _one_at_a_time:
                    return self._read_or_write(self._folder / key, cell, columns, may_share)
            except graph_key.NoKey as reason:
                _log.debug('graph not shared: cell=%s reason="%s"', type(cell).__name__, reason)
            except Exception as error:  # an error of the cache, or of the program, which the compilation below raises
                _log.debug('graph not shared: cell=%s error="%s"', type(cell).__name__, error)
        cell.compile(*columns)
        return False

    def _read_or_write(self, path: Path, cell: Any, columns: Sequence[Any], may_share: Callable[[], bool]) -> bool:
        shutil.rmtree(self._cache, ignore_errors=True)
        self._cache.mkdir()  # fails if rmtree has failed, or if the host's folder has been removed
        graph = self._cache / f"compile_cache_{self._next}.mindir"
        try:
            reads = path.exists()
            if reads:
                shutil.copyfile(self._folder / _HASH, self._cache / _HASH)
                shutil.copyfile(path, graph)
            before, known = _identity(graph), set(cell.compile_cache)
            with self._switched_on():
                cell.compile(*columns)
            self._next += 1
            phases = cell.compile_cache - known
            is_bound = _is_bound(cell, phases)
            if reads and _identity(graph) == before:
                if not is_bound:
                    EXECUTOR.del_net_res(cell, phases)
                    cell.compile_cache.difference_update(phases)
                    raise KungFuError("InternalError: a graph has other Parameters than the cell")
                _log.debug("graph read: cell=%s key=%s", type(cell).__name__, path.name)
                return True
            written = [each.name for each in self._cache.glob("*.mindir")]
            if not reads and is_bound and written == [graph.name] and may_share():
                if (self._cache / _HASH).exists():  # MindSpore writes this file with the process's first graph
                    (self._cache / _HASH).replace(self._folder / _HASH)
                graph.replace(path)
                _log.debug("graph written: cell=%s key=%s", type(cell).__name__, path.name)
            return False
        finally:
            shutil.rmtree(self._cache, ignore_errors=True)

    @contextlib.contextmanager
    def _switched_on(self) -> Iterator[None]:
        """Switch MindSpore's compile cache on."""
        stock: Any = context._context()
        set_param, level, files = type(stock).set_param, self._levels[_PIPELINE], self._api._get_compile_cache_dep_files
        set_param(stock, ms_ctx_param.compile_cache_path, str(self._private))
        set_param(stock, ms_ctx_param.enable_compile_cache, 1)
        stock.enable_compile_cache = True
        self._api._get_compile_cache_dep_files = lambda: _DEPENDENCIES
        self._levels[_PIPELINE] = max(level, _ERROR)
        try:
            yield
        finally:
            self._levels[_PIPELINE] = level
            self._api._get_compile_cache_dep_files = files
            stock.enable_compile_cache = False
            set_param(stock, ms_ctx_param.enable_compile_cache, 0)
            EXECUTOR._graph_executor.set_compile_cache_dep_files([])


def _is_bound(cell: Any, phases: set[str]) -> bool:
    """Return whether all Parameters of the cell's graphs belong to the cell.

    A graph that MindSpore reads gets only the cell's Parameters. If the cell called a function that uses another
    Parameter, the graph would have its own copy of that Parameter.
    """
    own = {parameter.name: parameter.data_ptr() for parameter in cell.get_parameters()}
    used = [params for phase in phases for params in EXECUTOR._graph_executor.get_params(phase).items()]
    return bool(phases) and all(tensor.data_ptr() == own.get(name) for name, tensor in used)


def _renew_lock() -> None:
    """Replace the lock in a child process, because a thread of the parent may hold the lock."""
    global _one_at_a_time
    _one_at_a_time = threading.RLock()


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with _one_at_a_time:
            return function(*arguments, **options)

    return call


def _identity(path: Path) -> tuple[int, int] | None:
    """Return a value that changes if the file is written again, or None if there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


@functools.cache
def _store() -> GraphStore | None:
    folder = env.GRAPHS.get()
    if folder is None or not ms.__version__.startswith(_VERSIONS):
        return None
    try:
        return GraphStore(Path(folder))
    except (OSError, ValueError) as error:
        _log.debug('graphs not shared: error="%s"', error)
        return None


def compile_or_read(cell: Any, columns: Sequence[Any], may_share: Callable[[], bool]) -> bool:
    """Compile `cell` in GRAPH mode, or read its graph if another worker on this host has compiled that graph.

    Args:
        cell: the cell. Its results must not depend on this worker's rank, or on the cluster.
        columns: tensors with the shapes and dtypes of the inputs.
        may_share: returns, after the compilation, whether another worker may use the graph.

    Returns:
        Whether the graph was read. If so, `may_share` has returned true in the worker that compiled the graph.
    """
    store = _store()
    if store is not None and store.process == os.getpid():
        return store.compile(cell, columns, may_share)
    cell.compile(*columns)
    return False
