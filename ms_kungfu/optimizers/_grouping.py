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


def take(gradients, members):  # type: ignore[no-untyped-def]
    """Those of the gradients that are members of a group."""
    taken = ()
    for i in members:
        taken = taken + (gradients[i],)  # type: ignore[assignment]
    return taken


def put_back(groups, places):  # type: ignore[no-untyped-def]
    """The gradients of all groups, in the order that they were brought in."""
    gradients = ()
    for group, position in places:
        gradients = gradients + (groups[group][position],)  # type: ignore[assignment]
    return gradients
