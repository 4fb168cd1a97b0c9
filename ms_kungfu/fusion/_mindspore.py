"""Read a fusion plan's input from MindSpore: the configuration of fusion and the parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from typing import Any

import mindspore as ms

from ms_kungfu.fusion.mode import Mode, configured, for_overlap, parse
from ms_kungfu.fusion.plan import Gradient, Plan, make_plan


def mode_of(fusion: Any = None, kind: str = "allreduce") -> Mode:
    """Return the mode that `fusion` sets. If `fusion` is None, return the mode of MindSpore's ``comm_fusion``."""
    return configured(ms.get_auto_parallel_context("comm_fusion"), kind) if fusion is None else parse(fusion)


def plan_of(parameters: Iterable[Any], fusion: Any = None, name: str = "gradients", overlaps: bool = False) -> Plan:
    """Return the plan for these parameters' gradients, with the parameters' current fusion ids."""
    gradients, mode = [_gradient(parameter) for parameter in parameters], mode_of(fusion)
    if overlaps:
        mode = for_overlap(mode, sum(gradient.nbytes for gradient in gradients))
    return make_plan(gradients, mode, name)


def _gradient(parameter: Any) -> Gradient:
    dtype = str(parameter.dtype).lower()
    # Compute the size from the shape, because a parameter may not be initialised yet.
    nbytes = prod(parameter.shape) * int(re.sub(r"\D", "", dtype) or 8) // 8
    return Gradient(parameter.name, nbytes, dtype, parameter.comm_fusion)
