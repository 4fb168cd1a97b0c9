"""Select the workers that run callbacks other than `KungFuElasticCallback`, and transfer these callbacks' state.

The rules are as follows. docs/elastic-training.md shows them as a table.

- Only the lowest living rank writes the files of MindSpore's own callbacks (:data:`WRITERS`). If that rank fails or
  leaves, the next rank continues from the same state.
- A file of an earlier run is loaded before the state transfer, which then sends the file's content to all workers,
  because perhaps only one worker has the file.
- All other callbacks run on every worker. `EarlyStopping` and `ReduceLROnPlateau`, which make a decision at the end of
  an epoch, get the same numbers on each worker (`ms_kungfu.callbacks.evaluation`, `ms_kungfu.callbacks.epoch_outputs`).
- If `ms_kungfu.replay` runs the program again, no worker writes files, so that the files of the first run stay
  unchanged.
- While a hook of a callback runs, the live page shows that this rank is in a callback.
- A worker that has left, or that hasn't reached the other workers' position, doesn't call `on_train_epoch_end`. For
  this worker the epoch isn't over, and there is no evaluation. Such a worker doesn't call `on_train_end` of MindSpore's
  callbacks either.
- A worker that ran no step of the epoch doesn't call `on_train_epoch_end` if the outputs of the epoch's last step are
  unknown. The outputs are unknown if all workers that ran this step have failed, or if an older version of ms_kungfu
  wrote the checkpoint.

A joining worker receives the state of the callbacks. The state of a MindSpore callback consists of all attributes that
are data. The state of a callback in the program is the result of ``state_dict()``, which the joining worker passes to
``load_state_dict(state)``.

A job that resumes from a checkpoint may run another program. So the job receives only those attributes of MindSpore's
callbacks that have changed since the callbacks were first used. The arguments that the new program has passed to the
callbacks, such as a folder or a patience, stay unchanged.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Callable

import numpy as np
from mindspore.train import Callback
from mindspore.train.callback import (
    BackupAndRestore,
    FlopsUtilizationCollector,
    LambdaCallback,
    ModelCheckpoint,
    OnRequestExit,
    SummaryCollector,
    TimeMonitor,
)

from ms_kungfu import _core, membership, runtime
from ms_kungfu.callbacks.codec import pack, unpack
from ms_kungfu.callbacks.evaluation import gather
from ms_kungfu.dataset import replaying
from ms_kungfu.elastic.program import is_behind

_log = logging.getLogger(__name__)

WRITERS = (ModelCheckpoint, SummaryCollector, BackupAndRestore, OnRequestExit, FlopsUtilizationCollector)
"""MindSpore callbacks that write files. If all workers ran them, the workers would overwrite each other's files."""

_LOADERS = (BackupAndRestore, OnRequestExit)  # writers whose `on_train_begin` loads the file of an earlier run
_AT_FIRST = "_kungfu_at_first"  # the attribute in which a callback's initial attributes are saved
# With `_first_step`, a SummaryCollector checks in each process what it can collect.
_OWN = {_AT_FIRST, "_first_step"}
_CLOCKS = (TimeMonitor, FlopsUtilizationCollector)  # their state consists of times, which are valid in one process only
_ENDS = ("on_train_epoch_end", "on_train_end")
_STEPS = ("on_train_epoch_begin", "on_train_step_begin", "on_train_step_end")
Hook = Callable[[Any], None]
Wrapper = Callable[[Any, Hook], Hook]


class Others:
    """The callbacks in a call of ``Model.train`` other than its elastic callback.

    Args:
        callbacks: these callbacks.
        writes: a function that returns whether this worker writes the files; required if the workers may have different
            callbacks. With None, all workers have the same callbacks, and the lowest living rank writes.
    """

    received: dict[str, Any] | None = None  # the received state, until `take_over` uses it
    resumed = False  # whether `received` is from a checkpoint

    def __init__(self, callbacks: Iterable[Any], writes: Callable[[], bool] | None = None) -> None:
        self._writes = writes or _is_lowest
        self._are_alike = writes is None
        self._callbacks: dict[str, Any] = {}
        self._all = list(callbacks)
        self._programs: list[Any] = []  # the program's callbacks, including functions in a `LambdaCallback`
        for callback in self._all:
            if not is_mindspores(callback) and not type(callback).__module__.startswith("ms_kungfu."):
                self._programs.append(callback)
            if is_carried(callback) or is_the_programs(callback):
                name = type(callback).__name__
                number = sum(key.startswith(f"{name}/") for key in self._callbacks)
                self._callbacks[f"{name}/{number}"] = callback
        self._hooked = ExitStack()
        self._restored: dict[str, Any] = {}
        self._traces = {key: _trace(c) for key, c in self._callbacks.items() if not is_carried(c)}
        self._warned = False
        self.has_stepped = True
        """Whether this worker has run a step of the current epoch."""
        self._new: set[str] = set()  # keys of the callbacks that have never been used before
        for key, callback in self._callbacks.items():
            if is_carried(callback) and not _has_state_dict(callback) and _AT_FIRST not in vars(callback):
                self._new.add(key)
                vars(callback)[_AT_FIRST] = _values(callback)
        for callback in self._callbacks.values():
            if _has_state_dict(callback):
                _capture(callback)  # if the state can't be sent, raise the error now and not when a worker joins

    # -- which callbacks run -------------------------------------------------------------------------------------------

    def load_files(self, run_context: Any) -> None:
        """Load the weights that MindSpore's callbacks saved in an earlier run. Called before the state transfer."""
        if replaying.current() is None:
            for callback in self._all:
                if isinstance(callback, _LOADERS):
                    callback.on_train_begin(run_context)

    def hook(self, asynchronous: bool = False) -> None:
        """Apply the rules of this module.

        `asynchronous`: whether training is asynchronous, so that workers reach the end at different times.
        """
        for key, callback in self._callbacks.items():
            if isinstance(callback, WRITERS) and replaying.current() is not None:
                for hook in ("on_train_begin", *_STEPS, *_ENDS):
                    self._replace(callback, hook, _nowhere)
            elif isinstance(callback, WRITERS):
                files = _Files(self._writes)
                wrappers: dict[str, Wrapper] = dict.fromkeys((*_STEPS, *_ENDS), self._at_the_writer)
                if isinstance(callback, ModelCheckpoint):
                    wrappers["on_train_step_end"] = files.write_or_note
                    if not asynchronous and self._are_alike:
                        wrappers["on_train_end"] = files.write_last
                if isinstance(callback, _LOADERS):
                    wrappers["on_train_begin"] = _nowhere  # `load_files` has already called `on_train_begin`
                for hook, how in wrappers.items():
                    self._replace(callback, hook, how)
            elif is_mindspores(callback):
                self._replace(callback, "on_train_epoch_end", self._where_outputs_are)
                self._replace(callback, "on_train_end", _where_training_is)
            if is_carried(callback):
                self._replace(callback, "on_train_begin", self._then_restore(key))
        for callback in self._programs:
            self._replace(callback, "on_train_epoch_end", self._where_outputs_are)
        for callback in self._all:
            for hook in (*_STEPS, *_ENDS):
                if _implements(callback, hook) or _implements(callback, hook.removeprefix("on_train_")):
                    self._replace(callback, hook, _shown)

    def _where_outputs_are(self, callback: Any, call: Hook) -> Hook:
        def end(run_context: Any) -> None:
            known = self.has_stepped or run_context.original_args().get("net_outputs") is not None
            if _takes_part() and known:
                call(run_context)

        return end

    def step_ends(self, request_stop: Callable[[], None]) -> None:
        """Record that a step ends. If the user has requested an exit (`OnRequestExit`), request the end of training."""
        self.has_stepped = True
        if any(isinstance(callback, OnRequestExit) and callback.exit for callback in self._callbacks.values()):
            request_stop()  # MindSpore itself checks for the request only with MS_ENABLE_GRACEFUL_EXIT=1

    def undone(self, step: int) -> None:
        """Forget that a step's file was written, because the step is repeated and must write the file again."""
        for callback in self._callbacks.values():
            if isinstance(callback, ModelCheckpoint) and callback._last_triggered_step == step:
                callback._last_triggered_step -= callback._config.save_checkpoint_steps or 1

    def unhook(self) -> None:
        """Restore the callbacks' own methods."""
        self._hooked.close()

    def _at_the_writer(self, callback: Any, call: Hook) -> Hook:
        return lambda run_context: call(run_context) if _takes_part() and self._writes() else None

    def _replace(self, callback: Any, hook: str, wrapper: Wrapper) -> None:
        replace_attribute(self._hooked, callback, hook, wrapper(callback, getattr(callback, hook)))

    def _then_restore(self, key: str) -> Callable[[Any, Hook], Hook]:
        """Wrap a callback's `on_train_begin`, so that it restores the received state at its end.

        A callback that follows the elastic callback runs `on_train_begin` after this worker has received the state.
        Without the wrapper, `on_train_begin` would reset this state.
        """

        def wrapper(callback: Any, begin: Hook) -> Hook:
            def begin_and_restore(run_context: Any) -> None:
                begin(run_context)
                if key in self._new:
                    vars(callback)[_AT_FIRST] = _values(callback)
                if key in self._restored:
                    _restore(callback, self._restored[key])

            return begin_and_restore

        return wrapper

    @property
    def carries_the_programs(self) -> bool:
        """Return whether at least one callback in the program has state to transfer."""
        return any(map(_has_state_dict, self._programs))

    # -- the callbacks' state ------------------------------------------------------------------------------------------

    def capture(self) -> Any:
        """Return the state of all callbacks whose state is transferred, in a form that can be written as JSON."""
        return {key: _capture(callback) for key, callback in self._callbacks.items() if is_carried(callback)}

    def take_over(self) -> None:
        """Continue from the received state, if this worker has received one."""
        captured, Others.received = Others.received, None
        if captured is None:
            return
        own = {key for key, callback in self._callbacks.items() if is_carried(callback)}
        if own != set(captured) and self._are_alike:
            differing = ", ".join(sorted(own ^ set(captured)))
            if Others.resumed:
                _log.warning('checkpoint differs: callbacks="%s". These callbacks keep their initial state', differing)
            else:
                _log.warning(
                    'misuse: check=callbacks differing="%s". Start all workers with the same program', differing
                )
        self._restored = {key: captured[key] for key in own & set(captured)}
        for key, found in self._restored.items():
            _restore(self._callbacks[key], found)

    def warn_of_what_is_not_carried(self) -> None:
        """Log a warning after a worker has joined, if the program's callbacks have changed but aren't transferred."""
        changed = {
            key.split("/")[0]: sorted(n for n, trace in _trace(self._callbacks[key]).items() if was.get(n) != trace)
            for key, was in self._traces.items()
        }
        named = [f"{name} ({', '.join(attributes)})" for name, attributes in changed.items() if attributes]
        if named and not self._warned and _is_lowest():
            self._warned = True
            _log.warning(
                'misuse: check=callbacks callbacks="%s". A worker has joined without the state of these '
                "callbacks; give them state_dict() and load_state_dict(state), or pass components= to "
                "KungFuElasticCallback",
                ", ".join(named),
            )


def replace_attribute(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of the object `owner`. When `stack` is closed, it restores the previous attribute."""
    if name in vars(owner):
        stack.callback(vars(owner).update, {name: vars(owner)[name]})
    else:
        stack.callback(vars(owner).pop, name, None)
    vars(owner)[name] = value


def is_mindspores(callback: Any) -> bool:
    """Return whether `callback` is an instance of a MindSpore callback other than `LambdaCallback`."""
    kinds = [kind for kind in type(callback).__mro__ if kind is not Callback]
    own = any(kind.__module__.startswith("mindspore.train.callback.") for kind in kinds)
    return own and not isinstance(callback, LambdaCallback)


def is_carried(callback: Any) -> bool:
    """Return whether the state of `callback` is sent to a joining worker."""
    return _has_state_dict(callback) or (is_mindspores(callback) and not isinstance(callback, _CLOCKS))


def is_the_programs(callback: Any) -> bool:
    return not type(callback).__module__.startswith(("mindspore.", "ms_kungfu."))


def _is_lowest() -> bool:
    return bool(_core.living()[0] == _core.rank())


def _takes_part() -> bool:
    return not runtime.detached() and not is_behind()


def _nowhere(callback: Any, call: Hook) -> Hook:
    return lambda run_context: None


def _implements(callback: Any, hook: str) -> bool:
    return hook in vars(callback) or getattr(type(callback), hook, None) is not getattr(Callback, hook)


def _shown(callback: Any, call: Hook) -> Hook:
    def hook(run_context: Any) -> None:
        with membership.doing("callback"):
            call(run_context)

    return hook


def _where_training_is(callback: Any, call: Hook) -> Hook:
    return lambda run_context: call(run_context) if _takes_part() else None


class _Files:
    """Record which files of a ModelCheckpoint have been written. Only one worker writes each file."""

    def __init__(self, writes: Callable[[], bool]) -> None:
        self._writes = writes
        self._ended = -1  # the step of the last file that this worker has finished

    def write_or_note(self, callback: Any, save: Hook) -> Hook:
        """Return the replacement for `on_train_step_end`, in which only one worker writes a file.

        The other workers record the step of the file, so that one of them can replace a failed writer.
        """

        def save_or_note(run_context: Any) -> None:
            params = run_context.original_args()
            if _takes_part() and self._writes():
                self._write(callback, save, run_context)
            elif _takes_part() and callback._check_save_ckpt(params, False):
                callback._last_triggered_step = params.cur_step_num

        return save_or_note

    def write_last(self, callback: Any, save: Hook) -> Hook:
        """Return a replacement for `on_train_end`, which writes the last file (collective).

        If the writer fails meanwhile, the next worker writes the file again.
        """

        def save_for_all(run_context: Any) -> None:
            if not _takes_part():
                return
            at_end = False
            while True:
                told = gather({"ended": self._ended, "at_end": at_end}).values()
                if any(row["at_end"] for row in told):
                    return
                # Rewrite the files that a failed writer has begun but not finished.
                callback._last_triggered_step = min(callback._last_triggered_step, max(row["ended"] for row in told))
                if self._writes():
                    with runtime.keep_waiting():
                        self._write(callback, save, run_context)
                    at_end = True

        return save_for_all

    def _write(self, callback: Any, save: Hook, run_context: Any) -> None:
        save(run_context)
        self._ended = callback._last_triggered_step


def _has_state_dict(callback: Any) -> bool:
    return callable(getattr(callback, "state_dict", None)) and callable(getattr(callback, "load_state_dict", None))


def _capture(callback: Any) -> Any:
    if _has_state_dict(callback):
        found = callback.state_dict()
        try:
            return pack(found)
        except TypeError as error:
            raise TypeError(f"{type(callback).__name__}.state_dict: {error}") from None
    at_first, unknown = vars(callback).get(_AT_FIRST, {}), object()
    captured: dict[str, Any] = {"given": {}, "learnt": {}}
    for name, value in _values(callback).items():
        captured["given" if at_first.get(name, unknown) == value else "learnt"][name] = value
    return captured


def _values(callback: Any) -> dict[str, Any]:
    """Return the packed values of a callback's attributes that can be sent to another worker."""
    found = {}
    for name, value in vars(callback).items():
        if name in _OWN:
            continue
        try:
            found[name] = pack(value)
        except TypeError:
            continue  # for example a cell, a lock or a file writer, which can't be used by another worker
    return found


def _restore(callback: Any, captured: Any) -> None:
    if _has_state_dict(callback):
        callback.load_state_dict(unpack(captured))
        return
    # A joining worker also needs the initial attributes, because not all of them depend only on arguments. For example,
    # the prefix of a ModelCheckpoint depends on the files in its folder.
    given = {} if Others.resumed else captured.get("given", {})
    for name, packed in {**given, **captured.get("learnt", {})}.items():
        value, present = unpack(packed), vars(callback).get(name)
        if isinstance(present, dict) and isinstance(value, dict):
            present.clear()  # changed in place, because the attribute may be an instance of a dict subclass
            present.update(value)
        else:
            vars(callback)[name] = value


def _trace(callback: Any) -> dict[str, Any]:
    """Return a dict from each data attribute's name to a short value that changes with the attribute.

    Large attributes aren't read completely, so some changes aren't detected.
    """
    traces: dict[str, Any] = {}
    for name, value in vars(callback).items():
        if value is None or isinstance(value, (bool, int, float, str)):
            traces[name] = value
        elif isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.size <= 64):
            traces[name] = value.tobytes()
        elif isinstance(value, (list, tuple, dict, set)):
            items = itertools.islice(value.items() if isinstance(value, dict) else value, 64)
            traces[name] = len(value), [repr(item) for item in items if _is_short(item)]
    return traces


def _is_short(item: Any) -> bool:
    plain = (bool, int, float, str)
    return isinstance(item, plain) or (isinstance(item, tuple) and all(isinstance(part, plain) for part in item))
