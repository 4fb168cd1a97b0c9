"""Show a job's progress in one line, from the job's status document. This module uses no clock and no I/O."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ms_kungfu._words import counted, printable
from ms_kungfu.launcher.state.account import number_of, spell, told

_MOST_REASON = 60  # characters
# The beginnings of the INFO messages whose content the progress line shows, too.
SHOWN_IN_LINE = ("worker started", "worker ready", "worker exited", "worker reaped", "cluster ", "resize", "prestart",
                 "standby used", "host registered", "host joined", "host left")  # fmt: skip


def progress_of(document: Mapping[str, Any]) -> list[str]:
    """Return the parts of the progress line, with the most important part first."""
    training, cluster = document.get("training") or {}, document.get("cluster")
    parts = training_of(training)[:1] if training else []
    if not parts or document["state"] not in ("running", "finishing"):
        why = f": {_short(document['why'])}" if document["why"] else ""
        parts.insert(0, f"{document['state']}{why}")
    if document.get("stalls"):
        parts.append(stall_of(document["stalls"][0]))
    parts += training_of(training)[1:] if training else []
    if cluster:
        parts.append(_workers(cluster, document.get("wanted")))
    changes = [each for each in document.get("changes", ()) if each["size_before"] is not None]
    if changes:
        parts.append(f"last change: {change_of(changes[-1])}")
    return [printable(part) for part in parts]


def training_of(training: Mapping[str, Any]) -> list[str]:
    """Return the progress of training: first the step, then the remaining time, rate, loss and epoch if known."""
    parts = [_steps(training)]
    if training["left_s"]:
        parts.append(f"{spell(round(training['left_s']))} left")
    if training["samples_per_s"]:
        parts.append(f"{training['samples_per_s']:.4g} samples/s")
    elif training["steps_per_s"] is not None:
        parts.append(f"{training['steps_per_s']:.3g} steps/s")
    if training["loss"] is not None:
        parts.append(f"loss {number_of(training['loss'])}")
    if training["epochs"]:
        parts.append(f"epoch {training['epoch']}/{training['epochs']}")
    return parts


def change_of(change: Mapping[str, Any]) -> str:
    """Return a short text about a change of the cluster: its time, sizes, state and reason."""
    when = time.strftime("%H:%M", time.localtime(change["chosen_at"] or change["wanted_at"]))
    state = "" if change["state"] == "committed" else f" {change['state']}"
    return f"{when} {change['size_before']} -> {change['size']}{state}: {_short(change['refused'] or change['why'])}"


def stall_of(stall: Mapping[str, Any]) -> str:
    """Return which ranks wait for which rank, and how long they have waited."""
    why = f" ({stall['why']})" if stall["why"] else ""
    waits = f"{told(stall['waiting'])} {'waits' if len(stall['waiting']) == 1 else 'wait'}"
    return f"{waits} for rank {stall['rank']}{why} for {stall['seconds']:.0f} s"


def _short(reason: str) -> str:
    return reason if len(reason) <= _MOST_REASON else f"{reason[: _MOST_REASON - 3]}..."


def _steps(training: Mapping[str, Any]) -> str:
    step, total = training["step"], training["total_steps"]
    if step is None:
        return "no step yet"
    return f"step {step}" if total is None else f"step {step}/{total} ({100 * step / max(total, 1):.0f}%)"


def _workers(cluster: Mapping[str, Any], wanted: Mapping[str, Any] | None) -> str:
    size = counted(cluster["size"], "worker")
    return size if wanted is None or wanted["size"] == cluster["size"] else f"{size} -> {wanted['size']}"


def as_log_line(document: Mapping[str, Any]) -> str:
    """Return the progress as a log line; "" if no step is known."""
    training, cluster = document.get("training"), document.get("cluster")
    if not training or training["step"] is None:
        return ""
    names: Sequence[str] = ("step", "total_steps", "epoch", "epochs", "loss", "samples_per_s", "steps_per_s", "left_s")
    words = [f"{name}={number_of(training[name])}" for name in names if training[name] is not None]
    if cluster:
        words.append(f"workers={cluster['size']}")
    words += [f'stall="{printable(stall_of(stall))}"' for stall in document.get("stalls", ())[:1]]
    return f"progress: {' '.join(words)}"
