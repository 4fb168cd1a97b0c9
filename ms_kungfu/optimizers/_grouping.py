"""Gradients into the groups of a plan and back; to be called from a graph as well as from Python."""

from __future__ import annotations

from mindspore.ops import constexpr


@constexpr
def check_count(brought, planned):  # type: ignore[no-untyped-def]  # these are read by MindSpore's parser
    """Raise ValueError unless there are as many gradients as the plan has."""
    if brought != planned:
        raise ValueError(
            f"{brought} gradients were brought for {planned} parameters; differentiate with respect to the optimizer's "
            "parameters, all of them and in their order"
        )
