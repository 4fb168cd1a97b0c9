"""Decide which random generators the workers share, and set the generators' states on a joining worker.

1. A generator is *shared* if its state was the same on all workers at their first `begin`, that is, if the program uses
   the same seed on all workers. A shared generator yields the same numbers on all workers, e.g. one image size per
   step. A joining worker therefore continues with the source rank's state.
2. Any other generator is *each worker's own*, e.g. for augmentation or noise. If a joining worker got the source rank's
   state, both workers would draw the same numbers forever. So the joining worker derives its state from the source
   rank's state and from the (call, step, rank) at which it joins. A repeated run of the same training derives the same
   state. Workers that join together derive different states.
3. When the workers of the first cluster begin together, they decide whether a generator is shared. If one worker begins
   alone, it can't decide, so a joining worker decides. The joining worker has run the same program from the beginning,
   so its own state at its first `begin` shows how the program sets its seeds. A seed that depends on the rank is
   detected, because the worker that began alone keeps rank 0, and a joining worker has another rank.
4. A decision is final. It is part of the progress, like the states at the first `begin` in (3). So the decision doesn't
   depend on which ranks are alive later. Such independence matters after rank 0 has failed, because a joining worker's
   seed may then equal the new rank 0's seed.

Tests: tests/mindspore/elastic/test_randomness.py
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable

import numpy as np

from ms_kungfu import runtime
from ms_kungfu.comm import Array
from ms_kungfu.elastic import program
from ms_kungfu.elastic.state import Component
from ms_kungfu.trained.inventory import collect_generators

# The generators for which the workers decide separately. MindSpore has two: the generator that `mindspore.manual_seed`
# sets, and the global seed, which datasets also use. One component contains both. Each other generator has its own
# component.
NAMES = ("mindspore_generator", "mindspore_seed", "random_python", "random_numpy", "random_generators")


def components(trained: Iterable[Any] = ()) -> list[Component]:
    """Return the state components for the random generators of Python, NumPy, MindSpore and the cells."""

    def restore_python(state: Any) -> None:
        version, numbers, gauss = state
        random.setstate((version, tuple(numbers), gauss))

    def capture_numpy() -> Any:
        kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        return [kind, np.asarray(keys).tolist(), position, has_gauss, gauss]

    def restore_numpy(state: Any) -> None:
        kind, keys, *rest = state
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))

    def seed_numpy(seed: int) -> None:
        np.random.seed([seed >> 32, seed & 0xFFFFFFFF])

    generators = collect_generators(trained)
    return [
        # Restore MindSpore's state before NumPy's, because setting MindSpore's seed also resets NumPy's generator.
        Component("random_mindspore", _capture_mindspore, _restore_mindspore, own=True, derive=_derive_mindspore),
        _component("random_python", random.getstate, restore_python, random.seed),
        _component("random_numpy", capture_numpy, restore_numpy, seed_numpy),
        _component(
            "random_generators",
            lambda: [g.get_state().asnumpy().tolist() for g in generators],
            lambda states: _restore_generators(generators, states),
            lambda seed: _seed_generators(generators, seed),
        ),
    ]


def _component(
    name: str, capture: Callable[[], Any], restore: Callable[[Any], None], seed: Callable[[int], None]
) -> Component:
    return Component(name, capture, restore, own=True, derive=lambda state: _derive(name, state, seed))


def _derive(name: str, state: Any, seed: Callable[[int], None]) -> None:
    if not program.current().generators.is_shared(name):
        seed(derived(name, state, _identity()))


def _identity() -> str:
    """Return the call, step and rank at which this worker joins or resumes, as a string."""
    progress = program.current().resume or {}
    return f"{progress.get('call')}/{progress.get('step')}/{runtime.current_rank()}"


def derived(name: str, state: Any, identity: str) -> int:
    """Derive a seed below 2**63 from another worker's `state` and this worker's `identity`.

    This function has no side effects.
    """
    return _number([name, state, identity])


def _number(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(json.dumps(value).encode(), digest_size=8).digest(), "little") >> 1


def note_origins(found: Sequence[Component]) -> None:
    """Record the generators' states at this process's first `begin`."""
    states = {c.name: c.capture() for c in found if c.name.startswith("random_")}
    states |= {f"mindspore_{part}": state for part, state in states.pop("random_mindspore").items()}
    program.current().generators.origins.update({name: _number(states[name]) for name in NAMES})


def row() -> list[int]:
    """Return hashes of the generator states at this process's first `begin`, in the order of `NAMES`."""
    origins = program.current().generators.origins
    return [origins.get(name, 0) for name in NAMES]


def decide(rows: Mapping[int, Sequence[int] | Array]) -> None:
    """Decide, from the rows of all workers, which of the undecided generators are shared.

    Each worker makes the same decision.
    """
    for column, name in enumerate(NAMES):
        same = len({int(each[column]) for each in rows.values()}) == 1
        program.current().generators.shared.setdefault(name, same)


def _capture_mindspore() -> Any:
    import mindspore as ms

    return {"seed": ms.get_seed(), "generator": ms.get_rng_state().asnumpy().tolist()}


def _restore_mindspore(state: Any) -> None:
    import mindspore as ms

    if state["seed"] is not None and state["seed"] != ms.get_seed():
        ms.set_seed(state["seed"])
    ms.set_rng_state(ms.Tensor(np.array(state["generator"], dtype=np.uint8)))


def _derive_mindspore(state: Any) -> None:
    import mindspore as ms

    _derive("mindspore_seed", state["seed"], lambda seed: ms.set_seed(seed & 0x7FFFFFFF))  # NumPy's seed has 32 bits
    _derive("mindspore_generator", state["generator"], lambda seed: ms.manual_seed(seed))


def _restore_generators(generators: Sequence[Any], states: Any) -> None:
    import mindspore as ms

    for generator, state in zip(generators, states):
        generator.set_state(ms.Tensor(np.array(state, dtype=np.uint8)))


def _seed_generators(generators: Sequence[Any], seed: int) -> None:
    for place, generator in enumerate(generators):
        generator.manual_seed(_number([seed, place]))
