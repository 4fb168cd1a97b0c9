"""Cost without failures: compare a step of ms_kungfu with the framework's own step, and switch parts off in turn.

The runs of a round follow one another, and each ratio compares runs of one round. `rate` is useful samples per second.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.churn.driver import Run
from benchmarks.churn.systems import OWN, PLAIN

ALL = ("elasticity", "ledger", "consistency", "heartbeats", "reduction")


@dataclass(frozen=True)
class Variant:
    """A system without some of its parts."""

    name: str
    system: str
    without: tuple[str, ...] = ()

    def run(self, workload: str, workers: int, seconds: float) -> Run:
        return Run(self.system, workload, "none", 0, seconds, 1, workers, 1_000_000, self.without)


VARIANTS = (
    # Only MindSpore: each worker trains alone on its share of the batch, with nn.Momentum.
    Variant("nn.Momentum, no reduction", PLAIN, ("elasticity", "ledger", "consistency", "heartbeats", "reduction")),
    Variant("ms_kungfu, no elasticity", PLAIN, ("elasticity", "ledger", "consistency", "heartbeats")),
    Variant("ms_kungfu", PLAIN, ("ledger",)),  # its defaults
    Variant("ms_kungfu, no consistency checks", PLAIN, ("ledger", "consistency")),
    Variant("ms_kungfu, no watch for hangs", PLAIN, ("ledger", "heartbeats")),
    Variant("ms_kungfu and a ledger", PLAIN, ("all on",)),
    Variant("ms_kungfu with shards", OWN, ("ledger",)),
    Variant("msrun", "msrun"),
    Variant("torchrun (DDP)", "torchrun"),
)
BASE = VARIANTS[0].name


def ratios(rates: Mapping[str, Sequence[float]], base: str = BASE) -> dict[str, float]:
    """Return each variant's step time as a multiple of that of `base`: the median ratio over the rounds.

    >>> ratios({"nn.Momentum, no reduction": [100.0, 50.0], "ms_kungfu": [80.0, 40.0]})
    {'nn.Momentum, no reduction': 1.0, 'ms_kungfu': 1.25}
    """
    return {
        name: statistics.median(theirs / own for own, theirs in zip(each, rates[base]))
        for name, each in rates.items() if each
    }  # fmt: skip


def markdown(found: Mapping[tuple[str, int], Mapping[str, Sequence[float]]]) -> str:
    """Return a Markdown table of the variants' rates and relative step times.

    Each key of `found`, a workload and a number of workers, has a column. Each variant has a row. A cell contains the
    median rate in samples per second, and the step time as a multiple of that of `BASE` (`ratios`).
    """
    lines = ["| | " + " | ".join(f"{workload}, {n} worker{'s' if n > 1 else ''}" for workload, n in found) + " |"]
    lines.append("|---" * (len(found) + 1) + "|")
    for variant in VARIANTS:
        texts = []
        for rates in found.values():
            own = rates.get(variant.name)
            text = "-" if not own else f"{statistics.median(own):.0f}/s"
            if own and variant.system != "torchrun" and rates.get(BASE):
                text += f", {ratios(rates)[variant.name]:.3f}"
            texts.append(text)
        lines.append(f"| {variant.name} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"
