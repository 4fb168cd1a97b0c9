"""How the training state reaches the workers that lack it: joining ones, and all as training begins.

No worker sends a mixture: if the source rank fails, a receiver restores its own values before it becomes the source.

Over several hosts a joining worker takes large tensors from its own host, if a rank there has the same bits. The ranks
with the state compare them first (`from_the_nearest`). Only hosts without the bits get them over the network.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Callable, TypeVar

import numpy as np

from ms_kungfu import comm, membership, runtime
from ms_kungfu.agreement import broadcast_json, gather_json, gather_living, told_by_one
from ms_kungfu.comm import Array
from ms_kungfu.dataset import contents
from ms_kungfu.dataset.shares import Shares
from ms_kungfu.elastic import program, randomness
from ms_kungfu.elastic.differences import differing
from ms_kungfu.elastic.state import TrainingState, restore_components
from ms_kungfu.errors import KungFuError
from ms_kungfu.trained import claims
from ms_kungfu.trained.inventory import assign, collect_parameters, fingerprint

_log = logging.getLogger(__name__)
Received = TypeVar("Received")

# Why a worker has come. The higher goes first if workers come for different things.
_FOR_PARAMETERS, _FOR_STATE = 1, 2


@contextlib.contextmanager
def from_the_nearest(root: int, content: Callable[[], int] | None) -> Iterator[None]:
    """Take broadcasts from `root` in it from a rank of the same host, if one has the same bits; collective.

    The source ranks follow from rows that all ranks have alike. If one of them fails, the broadcast fails at all ranks,
    as with the root.

    Args:
        content: a number for what this rank would send, which changes with each bit; None if it can't send, or sends
            something of its own. Called only if there is a choice.
    """
    where, core = membership.host_of_rank(), membership.current().core
    if len(set(where)) > 1:
        rows = gather_living(np.array(content is not None), "kungfu/state/able")
        if len({where[rank] for rank, able in rows.items() if able}) > 1:
            word = content() if content is not None else -1
            words = gather_living(np.array(word), "kungfu/state/content")
            core.set_sources([r for r, each in words.items() if each == words.get(root, -1) != -1])
    try:
        yield
    finally:
        core.set_sources([])


def _agree_on_purpose(purpose: int, lacking: bool, parameters: Sequence[Any], call: int = 0) -> tuple[bool, bool]:
    """Agree with all workers on what to share. Return (it is this one's turn, a worker lacks the state).

    A joining worker runs its program from the start and may come to `sync_net_parameters`, or to an earlier call of
    training, while the others are about to transfer the whole state. It then continues without, as it is about to
    receive everything, and the others wait for its next call.

    1. Workers that have the state stay in their call, and at this line of it, until the joining worker is there too.
       They repeat the agreement for as long as one has come for less.
    2. A joining worker comes to its calls in the program's order, one after another, so it comes to that call or its
       program ends. Its end is that of a failed worker, which the next agreement ignores.
    3. No state is sent before all have come for the same, so it reaches the objects of its call. Until then the joining
       worker is behind (`program.is_behind`) and begins no other collective of ms_kungfu's.
    4. Until then all workers with the state are in this loop, and none comes to a collective of the program's. So the
       joining worker passes the program's barriers and rejects its other collectives (`membership.is_catching_up`). It
       takes part in them again once it has come for the same.
    """
    row = np.array([purpose, lacking, fingerprint(parameters), call], dtype=np.int64)
    while True:
        rows = gather_living(row, "kungfu/state/purpose")
        come_for = {(int(each[0]), int(each[3])) for each in rows.values()}
        if len(come_for) == 1:
            break
        if (purpose, call) < max(come_for):
            if purpose == _FOR_STATE:
                program.current().call_of_state = max(come_for)[1]
            membership.set_catching_up(True)
            return False, True
    membership.set_catching_up(False)
    somebody_lacks = any(each[1] for each in rows.values())
    if somebody_lacks or purpose == _FOR_PARAMETERS:
        _check_programs({rank: int(each[2]) for rank, each in rows.items()}, parameters)
    return True, somebody_lacks


def models_differ(trained: Iterable[Any]) -> bool:
    """Return whether each worker trains a model of its own by design, as under an optimizer that averages models."""
    return not claims.replicas().isdisjoint(map(id, collect_parameters(trained)))


def share_parameters(parameters: Sequence[Any], root: int = 0) -> None:
    """Copy the root's values into each worker's `parameters`, in place; collective.

    If the root has failed, the lowest living rank replaces it. Return at once at a joining worker that is about to
    receive the whole state.
    """
    from ms_kungfu.ops._sync import broadcast_parameters

    runtime.init()
    turn, _ = _agree_on_purpose(_FOR_PARAMETERS, False, parameters)
    if turn:

        def receive(source: int) -> None:
            with _whole_or_not_at_all(parameters):
                broadcast_parameters(list(parameters), source, "kungfu/state/parameters")

        from_lowest_rank(receive, preferred=root)
        claims.mark(parameters)
        membership.state_received()  # such a program calls this its state


@contextlib.contextmanager
def _whole_or_not_at_all(tensors: Sequence[Any]) -> Iterator[None]:
    """Restore the tensors' own values if the worker that sends them fails: the next source must not send a mixture."""
    for tensor in tensors:
        if getattr(tensor, "has_init", False):
            tensor.init_data()
    before = [tensor.asnumpy().copy() for tensor in tensors]
    try:
        yield
    except Exception:
        for tensor, values in zip(tensors, before):
            assign(tensor, values)
        raise


def begin_alike(state: TrainingState, data: Mapping[str, Any] | None = None) -> None:
    """Make the state the same as training begins; collective.

    If parameters or buffers differ between the workers, all take those of the lowest rank. What differs by nature
    (models that are meant to, moving statistics) is made the same once, when it is trained for the first time.

    `data` is the part of the workers' data that has to be the same. KungFuError if that or the program differs.
    """
    tensors = [*state.parameters, *state.buffers.values()]
    by_nature = claims.replicas().union(map(id, (*state.averaged, *state.statistics)))
    common = [t for t in tensors if id(t) not in by_nature]
    own = [t for t in tensors if id(t) in by_nature]
    unmarked = not all(map(claims.is_marked, own))
    told = claims.content_of(json.dumps(data).encode())
    row = [fingerprint(state.parameters), claims.content(common), claims.content(own), unmarked, told]
    rows = gather_living(np.array([*row, *randomness.row()]), "kungfu/state/begin")
    randomness.decide({rank: each[len(row) :] for rank, each in rows.items()})
    _check_programs({rank: int(each[0]) for rank, each in rows.items()}, state.parameters)
    if len({int(each[4]) for each in rows.values()}) > 1:
        _tell_of_other_data(gather_json(data or {}, "kungfu/state/data"))
    differ = [len({int(each[column]) for each in rows.values()}) > 1 for column in (1, 2)]
    if not any(each[3] for each in rows.values()):
        differ[1] = False
    if any(differ):
        sent = {id(t) for tensors, sends in ((common, differ[0]), (own, differ[1])) if sends for t in tensors}
        part = TrainingState(
            [p for p in state.parameters if id(p) in sent],
            (),
            {name: buffer for name, buffer in state.buffers.items() if id(buffer) in sent},
        )

        def receive(root: int) -> None:
            with _whole_or_not_at_all([*part.parameters, *part.buffers.values()]):
                broadcast_tensors(part, root)

        from_lowest_rank(receive)
        if runtime.current_rank() == min(rows):
            _log.info('state transfer: source_rank=%d reason="the workers\' parameters differed"', min(rows))
    claims.mark(tensors)


def compare_contents(dataset: Shares) -> None:
    """Compare the data of workers that begin, or resume, together; collective.

    KungFuError, at all of them, if a sample number stands for another content at one of them. If one has no contents to
    compare, none claims that they are the same.
    """
    own = dataset.contents
    row = np.array([own is not None, 0 if own is None else own.word()], dtype=np.int64)
    rows = gather_living(row, "kungfu/data/contents")
    if not all(each[0] for each in rows.values()):
        dataset.leave_out_contents()
    elif len({int(each[1]) for each in rows.values()}) > 1:
        told = gather_json([] if own is None else own.state(), "kungfu/data/samples")
        everyones = {rank: contents.restored(each) for rank, each in told.items()}
        first = min(everyones)
        others = [rank for rank, each in everyones.items() if contents.differing([everyones[first], each])]
        apart = contents.difference(everyones.values())
        if not apart:  # one of them compares all samples, and another one some
            return
        raise KungFuError(
            f"ElasticDataset: {apart} at rank {first} differ from those at rank "
            f"{', '.join(map(str, others))}; {contents.REMEDY}"
        )


def _tell_of_other_data(everyones: Mapping[int, Mapping[str, Any]]) -> None:
    """Describe the first difference."""
    for what, groups in differing(everyones).items():
        told = " and ".join(f"{value} at rank {', '.join(map(str, ranks))}" for value, ranks in groups.items())
        raise KungFuError(f"the workers' data differ: {what} {told}; start all workers with the same data")


def _check_programs(fingerprints: Mapping[int, int], parameters: Iterable[Any]) -> None:
    """Compare the programs; collective if they differ."""
    if len(set(fingerprints.values())) > 1:
        raise KungFuError(first_difference(gather_json(described(parameters), "kungfu/state/names")))


def described(parameters: Iterable[Any]) -> list[str]:
    """Return names, shapes and dtypes."""
    return [f"{p.name} {tuple(p.shape)} {p.dtype}" for p in parameters]


def first_difference(everyones: Mapping[int, Sequence[str]]) -> str:
    """Return the message that ranks train other Parameters; it names the first ones that differ. Pure."""
    first = min(everyones)
    for rank, mine in everyones.items():
        if list(mine) == list(everyones[first]):
            continue
        pairs = zip_longest(everyones[first], mine, fillvalue="none")
        theirs, own = next((a, b) for a, b in pairs if a != b)
        return (
            f"rank {rank} trains other parameters than rank {first}: the first that differ are {own!r} at rank {rank} "
            f"and {theirs!r} at rank {first}; have all workers train the same ones, in one order"
        )
    raise AssertionError(f"no difference between {everyones}")


def share_state(state: TrainingState) -> bool:
    """Transfer the state to joining workers after a change of membership; collective.

    Return whether this worker received it.

    First the `averaged` tensors become the mean over those workers that have trained. Parameters reach every worker (at
    those that stay they are the same already). If the models are meant to differ (an optimizer that averages models),
    workers that stay keep theirs. Components are restored at joining workers only.

    At a joining worker in an earlier call than the others it returns at once, and the others wait until it comes to
    theirs.
    """
    joining = membership.is_joining()
    turn, lacking = _agree_on_purpose(_FOR_STATE, joining, state.parameters, state.call)
    if not turn:
        return False
    average(state.averaged, counted=not joining)
    if not lacking:
        return False

    def content() -> int:
        return claims.content([*state.parameters, *state.buffers.values()])

    def receive(root: int) -> Any:
        received = broadcast_json(lambda: {c.name: c.capture() for c in state.components}, root)
        own = not joining and models_differ(state.parameters)
        with from_the_nearest(root, None if joining or own else content):
            broadcast_tensors(state, root, keep=own)
        return received

    received = from_lowest_rank(receive, able=not joining)
    if joining:
        restore_components(state.components, received)
        claims.mark([*state.parameters, *state.buffers.values()])
        membership.state_received()
    return joining


class StateLostError(KungFuError):
    """No living rank can transfer what the others need."""


def from_lowest_rank(receive: Callable[[int], Received], able: bool = True, preferred: int | None = None) -> Received:
    """Receive from the lowest living rank that is `able`, or from the `preferred` one among them; collective.

    If it fails meanwhile, the next one replaces it. StateLostError, at all ranks, if none is able.
    """

    def choose(answers: Mapping[int, Array]) -> int:
        roots = [rank for rank, answer in answers.items() if answer]
        if not roots:
            raise StateLostError("every worker that had the training state has failed; resume from a checkpoint")
        return preferred if preferred in roots else roots[0]

    return told_by_one(
        np.array(able), "kungfu/state/root", choose, lambda root, _: receive(root), "handed over the training state"
    )


def average(tensors: Sequence[Any], counted: bool = True) -> None:
    """Average each tensor over the workers that are `counted`, in place, and the same everywhere; collective.

    In float64, so that of tensors of fewer bits the mean of equal values is that value.
    """
    if not tensors or runtime.current_cluster_size() == 1:
        return
    values = [t.asnumpy().astype(np.float64).ravel() for t in tensors]
    row = np.concatenate([*values, [1.0]])
    # An uncounted one's may be anything, even infinite.
    total = comm.all_reduce(row if counted else np.zeros_like(row), name="kungfu/state/averages")
    if total[-1] == 0:
        return  # the ranks with the training state have failed, which the transfer will report
    means = np.split(total[:-1] / total[-1], np.cumsum([v.size for v in values])[:-1])
    for tensor, mean in zip(tensors, means):
        assign(tensor, mean.reshape(tensor.shape))


def broadcast_tensors(state: TrainingState, root: int, keep: bool = False) -> None:
    """Copy the root's parameters and buffers into each worker's, in place; collective.

    With `keep` this worker's parameters stay as they are.
    """
    from ms_kungfu.ops._sync import broadcast_parameters

    broadcast_parameters(list(state.parameters), root, "kungfu/state/parameters", keep)
    for name, buffer in state.buffers.items():
        # Not by the kernel, which is for Parameters only: another tensor's memory may serve elsewhere.
        values = buffer.asnumpy()
        content = np.frombuffer(values.tobytes(), dtype=np.uint8)
        received = comm.broadcast(content, root=root, name=f"kungfu/state/buffer/{name}")
        if runtime.current_rank() != root:
            assign(buffer, np.frombuffer(received, dtype=values.dtype).reshape(values.shape))
