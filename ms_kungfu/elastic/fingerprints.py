"""Checksums of what decides the next step, by which two runs of a training are compared."""

from __future__ import annotations

from ms_kungfu.elastic.checkpoint import named_tensors
from ms_kungfu.elastic.differences import checksum
from ms_kungfu.elastic.state import TrainingState


def fingerprint(now: TrainingState) -> dict[str, str]:
    """Of each weight, moment, moving statistic, rate and buffer, by the name that it has in a checkpoint, a checksum.
    Left out is what `averaged=` lets differ between workers."""
    own = {id(tensor) for tensor in now.averaged} - {id(tensor) for tensor in now.statistics}
    return {
        name: checksum(tensor.asnumpy()) for name, tensor in named_tensors(now) if tensor.size and id(tensor) not in own
    }
