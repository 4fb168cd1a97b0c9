"""Transfer the training state to joining workers, and make it equal on all workers when training begins.

No worker sends a mixture of old and new values: if the source rank fails during a transfer, each receiver restores its
previous values before it can become the source rank.

In a job on several hosts, a joining worker receives large tensors from a rank on its own host if that rank's tensors
are bitwise identical to the source rank's. First, the ranks that have the training state compare hashes of their states
(`from_the_nearest`). Only hosts without such a rank receive the tensors over the network.
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

# The purpose for which a worker enters the agreement. If the workers' purposes differ, a worker with the lower purpose
# continues without a transfer.
_FOR_PARAMETERS, _FOR_STATE = 1, 2


@contextlib.contextmanager
def from_the_nearest(root: int, content: Callable[[], int] | None) -> Iterator[None]:
    """In this context, receive `root`'s broadcasts from a rank on this host, if it has the same data (collective).

    All ranks compute the same source ranks, because they gather the same rows. If a source rank fails, the broadcast
    fails on all ranks, as if the root had failed.

    Args:
        content: a function that returns a hash of the data that this rank could send. Pass None if this rank doesn't
            have the data, or if its data differs by design. The function is called only if several hosts have the data.
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
    """Agree with all workers on what to transfer. Return (whether to transfer now, whether a worker lacks the state).

    A joining worker runs its program from the beginning. It may call `sync_net_parameters`, or begin an earlier
    training call, while the other workers are about to transfer the whole state. In this case, the joining worker
    continues without a transfer, because it will receive the whole state later. The other workers wait for its next
    call.

    1. Workers that have the state stay in this loop until the joining worker reaches the same call. These workers
       repeat the agreement while a worker has entered for a lower purpose or an earlier call.
    2. A joining worker makes its calls in the program's order. So either it reaches the other workers' call, or its
       program ends. In the second case, the worker counts as failed, and the next agreement ignores it.
    3. No state is sent before all workers have entered for the same purpose and call. So the state that was captured in
       a training call is restored into the objects of the same call. Until then, the joining worker is behind
       (`program.is_behind`), and begins no other ms_kungfu collective.
    4. Until all workers have entered, those that have the state are in this loop, so they can't enter the program's
       collectives. Therefore the joining worker skips the program's barriers, and rejects the program's other
       collectives (`membership.is_catching_up`). After it has entered for the same purpose, it takes part in all
       collectives.
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
    """Return whether each worker trains a separate model by design, e.g. with an optimizer that averages models."""
    return not claims.replicas().isdisjoint(map(id, collect_parameters(trained)))


def share_parameters(parameters: Sequence[Any], root: int = 0) -> None:
    """Copy the values of the root's `parameters` into the `parameters` of each worker, in place (collective).

    If the root has failed, the lowest living rank replaces it. On a joining worker that will receive the whole state
    later, the function returns without waiting.
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
        membership.state_received()  # a program that uses this function has no other state to receive


@contextlib.contextmanager
def _whole_or_not_at_all(tensors: Sequence[Any]) -> Iterator[None]:
    """Restore the tensors' previous values if an error ends this context, e.g. because the source rank has failed.

    Without this, the next source rank might send a mixture of old and new values.
    """
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
    """Make the state equal on all workers when training begins (collective).

    If parameters or buffers differ between the workers, all workers use those of the lowest rank. Values that differ by
    design (models of asynchronous workers, moving statistics) are made equal only once, before the first step that
    changes them. `data` contains the settings that must be equal for the workers' data. Raise KungFuError if the
    workers' data or programs differ.
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
            _log.info('state transfer: source_rank=%d reason="parameters differed at the start"', min(rows))
    claims.mark(tensors)


def begin_data_alike(dataset: Shares) -> None:
    """Let all workers begin a training call at the same position in `dataset` (collective).

    A worker that joined in a call with another dataset hasn't counted the earlier epochs of this dataset. So all
    workers use the state of the worker that has trained on the most samples of this dataset.
    """

    def furthest(rows: Mapping[int, Array]) -> int:
        return max(rows, key=lambda rank: (*rows[rank].tolist(), -rank))

    def receive(root: int, rows: Mapping[int, Array]) -> None:
        if any(row.tolist() != rows[root].tolist() for row in rows.values()):
            state = broadcast_json(dataset.state, root)
            if rows[runtime.current_rank()].tolist() != rows[root].tolist():
                dataset.restore(state)

    told_by_one(np.array([dataset.epoch, dataset.position]), "kungfu/state/data/position", furthest, receive)


def compare_contents(dataset: Shares) -> None:
    """Compare the samples of workers that begin or resume training together (collective).

    Raise KungFuError on all these workers if two workers have different content for the same sample number. If a worker
    has no contents to compare, the contents aren't recorded as equal.
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
        if not apart:  # some workers may have hashed all samples, and others only some of them
            return
        raise KungFuError(
            f"ElasticDataset: {apart} at rank {first} differ from those at rank "
            f"{', '.join(map(str, others))}; {contents.REMEDY}"
        )


def _tell_of_other_data(everyones: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise a KungFuError that describes the first difference between the workers' data."""
    for what, groups in differing(everyones).items():
        told = " and ".join(f"{value} at rank {', '.join(map(str, ranks))}" for value, ranks in groups.items())
        raise KungFuError(f"the workers' data differ: {what} {told}; start all workers with the same data")


def _check_programs(fingerprints: Mapping[int, int], parameters: Iterable[Any]) -> None:
    """Raise KungFuError if the workers' programs have different fingerprints; collective in that case."""
    if len(set(fingerprints.values())) > 1:
        raise KungFuError(first_difference(gather_json(described(parameters), "kungfu/state/names")))


def described(parameters: Iterable[Any]) -> list[str]:
    """Return the name, shape and dtype of each parameter as a string."""
    return [f"{p.name} {tuple(p.shape)} {p.dtype}" for p in parameters]


def first_difference(everyones: Mapping[int, Sequence[str]]) -> str:
    """Return an error message that names the first Parameters that differ between two ranks.

    This function has no side effects.
    """
    first = min(everyones)
    for rank, mine in everyones.items():
        if list(mine) == list(everyones[first]):
            continue
        pairs = zip_longest(everyones[first], mine, fillvalue="none")
        theirs, own = next((a, b) for a, b in pairs if a != b)
        return (
            f"rank {rank} trains other parameters than rank {first}: the first that differ are {own!r} at rank {rank} "
            f"and {theirs!r} at rank {first}; pass the same parameters in the same order on all workers"
        )
    raise AssertionError(f"no difference between {everyones}")


@membership.traced("state transfer")
def share_state(state: TrainingState) -> bool:
    """Transfer the state to joining workers after a change of the cluster (collective).

    Return whether this worker has received the state.

    First, each of the `averaged` tensors is replaced by its mean over the existing members. Then the parameters are
    sent to every worker; existing members already have the same values. If the models differ by design (with an
    optimizer that averages models), existing members keep their own parameters. Components are restored only on joining
    workers.

    On a joining worker that is in an earlier training call than the others, the function returns without waiting. The
    other workers wait until that worker reaches their call.
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
    """All ranks that had the training state have failed."""


def from_lowest_rank(receive: Callable[[int], Received], able: bool = True, preferred: int | None = None) -> Received:
    """Receive data from the lowest living rank that is able to send it (collective).

    `able`: whether this rank can send the data. If rank `preferred` is able, it is the sender instead. If the sender
    fails during the transfer, the next able rank replaces it. Raise StateLostError on all ranks if no rank is able.
    """

    def choose(answers: Mapping[int, Array]) -> int:
        roots = [rank for rank, answer in answers.items() if answer]
        if not roots:
            raise StateLostError("every worker that had the training state has failed; resume from a checkpoint")
        return preferred if preferred in roots else roots[0]

    return told_by_one(
        np.array(able), "kungfu/state/root", choose, lambda root, _: receive(root), "sent the training state"
    )


def average(tensors: Sequence[Any], counted: bool = True) -> None:
    """Average each tensor over the workers, in place, with the same result on every worker (collective).

    `counted`: whether this worker's values contribute. The sum is computed in float64, so that the mean of equal values
    of a smaller dtype is exactly that value.
    """
    if not tensors or runtime.current_cluster_size() == 1:
        return
    values = [t.asnumpy().astype(np.float64).ravel() for t in tensors]
    row = np.concatenate([*values, [1.0]])
    # The values of a worker that doesn't contribute are arbitrary and may be infinite, so it sends zeros.
    total = comm.all_reduce(row if counted else np.zeros_like(row), name="kungfu/state/averages")
    if total[-1] == 0:
        return  # all ranks with the training state have failed; the state transfer reports that
    means = np.split(total[:-1] / total[-1], np.cumsum([v.size for v in values])[:-1])
    for tensor, mean in zip(tensors, means):
        assign(tensor, mean.reshape(tensor.shape))


def broadcast_tensors(state: TrainingState, root: int, keep: bool = False) -> None:
    """Copy the root's parameters and buffers into those of each worker, in place (collective).

    With `keep`, this worker's parameters don't change.
    """
    from ms_kungfu.ops._sync import broadcast_parameters

    broadcast_parameters(list(state.parameters), root, "kungfu/state/parameters", keep)
    for name, buffer in state.buffers.items():
        # The broadcast kernel supports only Parameters, because other tensors may share their memory.
        values = buffer.asnumpy()
        content = np.frombuffer(values.tobytes(), dtype=np.uint8)
        received = comm.broadcast(content, root=root, name=f"kungfu/state/buffer/{name}")
        if runtime.current_rank() != root:
            assign(buffer, np.frombuffer(received, dtype=values.dtype).reshape(values.shape))
