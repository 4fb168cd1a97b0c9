"""When a training's checkpoints are written and by which worker, and what the training begins from."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any, Callable

from ms_kungfu import runtime
from ms_kungfu.agreement import broadcast_json, gather_json
from ms_kungfu.elastic import handover, program, state
from ms_kungfu.elastic.checkpoint import CheckpointFolder, restore_tensors, take_snapshot
from ms_kungfu.elastic.options import Options
from ms_kungfu.elastic.state import TrainingState
from ms_kungfu.errors import KungFuError

_log = logging.getLogger(__name__)


class Checkpointing:
    """Of one training. Everything but `is_due` is collective."""

    def __init__(self, options: Options, now: Callable[[], TrainingState]) -> None:
        folder = options.checkpoint_dir
        if folder is not None and not isinstance(folder, CheckpointFolder):
            folder = CheckpointFolder(folder, options.keep_checkpoints)
        self.folder = folder
        """None where there are none."""
        self._every = options.checkpoint_every
        self._resume = options.resume
        self._now = now

    def is_due(self, step: int) -> bool:
        return self._every is not None and step % self._every == 0

    def write(self, step: int) -> None:
        """Have the lowest rank write the state as it is, in the background. ValueError where there is no folder."""
        if self.folder is None:
            raise ValueError("there is nowhere to write a checkpoint to; give checkpoint_dir")
        now, mine = self._now(), program.current()
        handover.average(now.averaged)
        own = gather_json({c.name: c.capture() for c in now.components if c.own}, "kungfu/checkpoint")
        mine.checkpoint, mine.writes_checkpoint = step, runtime.current_rank() == min(own)
        if not mine.writes_checkpoint:
            return
        host = {
            "components": {c.name: c.capture() for c in now.components if not c.own},
            "own": list(own.values()),
        }
        self.folder.save(take_snapshot(step, now, host))

    def make_up(self, step: int) -> None:
        """Where the worker that wrote the last checkpoint may have died in it: look, and write another one. After a
        change of the cluster, when all have the state, and when training is over."""
        mine, folder = program.current(), self.folder
        last = mine.checkpoint
        if folder is None or last is None:
            return

        def look() -> str:
            # Who wrote it is the lowest rank for as long as it is a member. One that has been sent away ends its
            # writing first; then there is one checkpoint more.
            return "writing" if mine.writes_checkpoint else "there" if folder.has(last) else "lost"

        found = handover.from_lowest_rank(partial(broadcast_json, look))
        if found != "writing":
            mine.checkpoint = None
        if found == "lost":
            _log.warning(
                "the checkpoint of step %d was lost with the worker that wrote it; one of step %d takes its place",
                last,
                step,
            )
            self.write(step)

    def begin(self, joined: bool, goes_on: bool) -> None:
        """A call of training begins: at the first one with this folder all take the newest checkpoint, if there is one.

        Not at one that has `joined`, nor where training `goes_on` in a call that the others have begun before.
        """
        if self.folder is None:
            return
        path = os.path.abspath(self.folder.folder)
        known = program.current().checkpoint_folders
        if not joined and not goes_on and path not in known:
            self._restore(self.folder)
        # Also at a joiner that comes to a call which the others have begun before: they have read it.
        known.add(path)

    def _restore(self, folder: CheckpointFolder) -> None:
        """The lowest rank reads it: where there are several machines the others may not see its folder."""
        now, rank = self._now(), runtime.current_rank()

        def receive(root: int) -> Any:
            answer = broadcast_json(lambda: self._open(folder, now), root)
            if answer["host"] is not None:
                handover.broadcast_tensors(now, root)
            return answer

        answer = handover.from_lowest_rank(receive)
        if answer["error"]:
            raise KungFuError(answer["error"])
        host = answer["host"]
        if host is None:
            return
        # A worker that the checkpoint has nothing of goes on as a joiner does.
        own = host["own"][rank] if rank < len(host["own"]) else host["own"][0]
        state.restore_components(now.components, {**host["components"], **own})
        program.current().checkpoint = None  # what it says is of the job that wrote it
        _log.info("resumed from %s on %d workers", answer["path"], runtime.current_cluster_size())

    def _open(self, folder: CheckpointFolder, now: TrainingState) -> dict[str, Any]:
        try:
            folder.remove_unfinished()
            if not self._resume:
                there = folder.paths()
                text = (
                    f"{folder.folder} has {len(there)} checkpoints of an earlier training; resume from them, or give "
                    "another folder"
                )
                return {"error": text if there else "", "host": None}
            found = folder.load()
            if found is None:
                _log.info("no checkpoint in %s: training starts from the beginning", folder.folder)
                return {"error": "", "host": None}
            path, entries, host = found
            restore_tensors(now, entries, path)
            return {"error": "", "host": host, "path": str(path)}
        except Exception as error:
            # Whatever it is, the others wait for the outcome and have to be told.
            known = isinstance(error, KungFuError)
            return {"error": str(error) if known else f"{type(error).__name__}: {error}", "host": None}
