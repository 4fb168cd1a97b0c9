"""Compute checksums of the state that decides the next step, to compare two runs of a training."""

from __future__ import annotations

from ms_kungfu.elastic.checkpoint import named_tensors
from ms_kungfu.elastic.differences import checksum
from ms_kungfu.elastic.state import TrainingState


def fingerprint(now: TrainingState) -> dict[str, str]:
    """Return a checksum of each weight, moment, moving statistic, rate and buffer, by its name in a checkpoint.

    The result lacks tensors that `averaged=` allows to differ between workers.
    """
    own = {id(tensor) for tensor in now.averaged} - {id(tensor) for tensor in now.statistics}
    return {
        name: checksum(tensor.asnumpy()) for name, tensor in named_tensors(now) if tensor.size and id(tensor) not in own
    }
