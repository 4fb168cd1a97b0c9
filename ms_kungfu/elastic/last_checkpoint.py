"""The checkpoint that a training writes before its job ends by a signal to a launcher.

1. The launcher notifies the workers that have a checkpoint folder, and are in a call of training (`JobEnd`).
2. They end their present step, and agree behind it that the job ends. Another worker may not know of it yet.
3. All write the checkpoint of that step. Then each hangs up, and waits for the signal.
4. The launcher sends the signal once all have hung up. It ends the program as if it had come in the middle of the step.

A program with a handler of its own for the signal trains on until then: the handler decides how it ends.
"""

from __future__ import annotations

import signal
import sys
import threading
from dataclasses import dataclass

from ms_kungfu import membership
from ms_kungfu.dataset import replaying
from ms_kungfu.elastic import event_log, program
from ms_kungfu.elastic.checkpoint import Checkpointing

_LOOK_S = 0.05


@dataclass
class LastCheckpoint:
    """The last checkpoint of one training."""

    checkpoints: Checkpointing
    agreed: int = 0  # the signal by which the job ends after this step; the same at all workers
    _watch: membership.JobEnd | None = None

    def begin(self) -> None:
        """Note that this worker is in a call of training."""
        self.end()
        if self.checkpoints.folder is not None and replaying.current() is None:
            self._watch = membership.watch_job_end()

    def end(self) -> None:
        """Note that the call has ended."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    @property
    def signal(self) -> int:
        """The signal by which the job ends, as far as this worker knows; 0 as long as it doesn't."""
        return 0 if self._watch is None else self._watch.signal

    def carry_out(self, step: int) -> None:
        """Write the checkpoint of this step, if the job ends after it, and wait for the signal; collective."""
        number, self.agreed = self.agreed, 0
        if not number:
            return
        event_log.job_ends(step, signal.Signals(number).name)
        if program.current().checkpoint != step:  # it was due
            self.checkpoints.write(step)
        if self.checkpoints.folder is not None:
            self.checkpoints.folder.wait()
        self.end()
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler):
            return
        while threading.main_thread().is_alive():
            membership.current().ports.sleep(_LOOK_S)
        sys.exit()  # KeyboardInterrupt has ended the program, but for this thread
