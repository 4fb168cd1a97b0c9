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


# By slices: a graph of ResNet-50's 161 gradients, taken one by one, took seconds longer to compile.


def take(gradients, runs):  # type: ignore[no-untyped-def]
    """The gradients of a group: the stretches [start, stop) of all of them."""
    taken = ()
    for start, stop in runs:
        taken = taken + gradients[start:stop]
    return taken


def put_back(groups, pieces):  # type: ignore[no-untyped-def]
    """All gradients in the order that they were brought in: the stretches (group, start, stop) of the groups."""
    gradients = ()
    for group, start, stop in pieces:
        gradients = gradients + groups[group][start:stop]
    return gradients
