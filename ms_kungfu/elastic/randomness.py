"""The random generators of a training: which of them the workers share, and which state a joining worker's get.

1. A generator is *shared* if its state was the same on all workers as they came to their first `begin`: the program
   seeds it alike everywhere. It then counts for all, for example for an image size that is drawn once a step. So a
   joining worker continues with the source rank's state.
2. Any other generator is *each worker's own*, for example for augmentation or noise. With the source rank's state two
   workers would draw the same numbers for ever. A joining worker's state is a function of the source rank's state and
   of (call, step, rank) at which it joins. It is the same whenever the same training is run again, and another one for
   each of the workers that join together.
3. The workers of the first cluster decide which it is as they begin together. A worker that began alone doesn't know
   it. There the joining worker decides. It has run the same program from the start, so its own state at its first
   `begin` shows how the program seeds. A program that seeds by the rank is detected: the worker that began alone keeps
   rank 0, and a joining worker has another one.
4. A decision holds for ever and travels in the progress, as does the state of (3). So it doesn't depend on which ranks
   live later. After rank 0 has failed, the seed of the new rank 0 may be the one that a joining worker's program takes
   for its own rank.

tests/mindspore/elastic/test_randomness.py
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

# Names of the generators that are shared or own by themselves. MindSpore has two: the generator, which
# `mindspore.manual_seed` sets, and the global seed, which datasets use, too. The others are components each.
NAMES = ("mindspore_generator", "mindspore_seed", "random_python", "random_numpy", "random_generators")


def components(trained: Iterable[Any] = ()) -> list[Component]:
    """Return components of the global random generators of Python, NumPy and MindSpore, and of cells' generators."""

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
        # First: setting MindSpore's seed resets NumPy's as well.
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
    """Return where this worker joins, or resumes, and as which rank."""
    progress = program.current().resume or {}
    return f"{progress.get('call')}/{progress.get('step')}/{runtime.current_rank()}"


def derived(name: str, state: Any, identity: str) -> int:
    """Return a seed below 2**63 for the worker of this identity that begins with another one's state. Pure."""
    return _number([name, state, identity])


def _number(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(json.dumps(value).encode(), digest_size=8).digest(), "little") >> 1


def note_origins(found: Sequence[Component]) -> None:
    """Record the generators' states as this process comes to its first `begin`."""
    states = {c.name: c.capture() for c in found if c.name.startswith("random_")}
    states |= {f"mindspore_{part}": state for part, state in states.pop("random_mindspore").items()}
    program.current().generators.origins.update({name: _number(states[name]) for name in NAMES})


def row() -> list[int]:
    """Return the process's row, in the order of `NAMES`, for the others with which it begins."""
    origins = program.current().generators.origins
    return [origins.get(name, 0) for name in NAMES]


def decide(rows: Mapping[int, Sequence[int] | Array]) -> None:
    """Decide what isn't decided yet by the rows of all workers; the same at each of them."""
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

    _derive("mindspore_seed", state["seed"], lambda seed: ms.set_seed(seed & 0x7FFFFFFF))  # NumPy's has 32 bits
    _derive("mindspore_generator", state["generator"], lambda seed: ms.manual_seed(seed))


def _restore_generators(generators: Sequence[Any], states: Any) -> None:
    import mindspore as ms

    for generator, state in zip(generators, states):
        generator.set_state(ms.Tensor(np.array(state, dtype=np.uint8)))


def _seed_generators(generators: Sequence[Any], seed: int) -> None:
    for place, generator in enumerate(generators):
        generator.manual_seed(_number([seed, place]))
