"""Describe a host for its registration with the controller, and check the descriptions of other hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Callable

from ms_kungfu._version import VERSION, mindspore_version
from ms_kungfu._words import printable
from ms_kungfu.launcher.devices import ASCEND, GPU, Devices
from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.wire.messages import CpuIsa, Registration

# Options that may differ between hosts, or that only one host has.
_OF_EACH_HOST = {
    "command", "quiet", "show_workers", "logdir", "logfile", "prefix", "progress", "builtin_port",
    "secret", "delay_s", "hosts",
}  # fmt: skip
_SHOWN = 160  # a warning shows at most this many characters of a command
OF_THE_JOB = [each.name for each in fields(Options) if each.metadata and each.name not in _OF_EACH_HOST]


def registration_of(
    options: Options, devices: Devices, cores: list[int], taken: tuple[int, ...], cpu_isa: CpuIsa | None
) -> Registration:
    """Return this host's registration."""
    flags = {} if options.joins else flags_of(options)
    kind: Any = None if devices.kind is None else devices.kind.name
    logdir = b"" if options.logdir is None else os.fsencode(options.logdir)
    mindspore = mindspore_version() if options.hosts.is_several else ""  # takes 20 ms, so a single host skips it
    return Registration(
        options.host.name, VERSION, mindspore, flags, cores, kind, devices.each, logdir, taken, cpu_isa
    )  # fmt: skip


def first_workers(options: Options) -> int:
    """Return the number of workers on this host at the start of the job, or 0 if this host joins a running job."""
    if options.joins:
        return 0
    first = options.hosts.first_cluster(options.size, options.ports, options.control_port, 0)
    return sum(worker.host == options.host.name for worker in first.workers)


def devices_of(registration: Registration) -> Devices:
    kinds = {kind.name: kind for kind in (GPU, ASCEND)}
    return Devices(None if registration.device_kind is None else kinds[registration.device_kind], registration.devices)


def flags_of(options: Options) -> dict[str, str]:
    """Return the values of the flags that apply to the whole job, by the flags' names on the command line."""
    found = {
        f"-{each.metadata['name']}": str(getattr(options, each.name))
        for each in fields(Options)
        if each.name in OF_THE_JOB
    }
    return {**found, "-H": str(options.hosts), "-H's head": options.hosts.head.name}


def other_versions(host: str, version: str, mindspore: str, own: Registration) -> str:
    """Return the reason to reject a host that uses these versions, or "" if this host uses the same versions."""
    if version != own.version:
        return f"ms_kungfu is {version} on {host}, but {own.version} on {own.host}; install the same on all hosts"
    if mindspore != own.mindspore:
        return (
            f"MindSpore is {mindspore or 'not installed'} on {host}, but {own.mindspore or 'not installed'} on "
            f"{own.host}; "
            "install the same on all hosts"
        )
    return ""


def other_command(
    host: str, command: Sequence[str], own_host: str, own: Sequence[str], exists: Callable[[str], bool] = os.path.exists
) -> str:
    """Return a warning if a host runs another command than this host, or "" if both run the same command.

    A host isn't rejected because of a different command. Its interpreter and files may be in other folders, and other
    differences may be intended, too.

    `exists(path)` returns whether a file exists on this host. This host can't look for files on the other host.
    """
    words, own_words = list(command)[1:], list(own)[1:]
    if len(words) == len(own_words) and all(_alike(*pair, exists) for pair in zip(words, own_words)):
        return ""
    theirs, ours = _excerpts(" ".join(command), " ".join(own))
    return f'{host} runs "{theirs}", but {own_host} runs "{ours}": all hosts should run the same training'


def _alike(word: str, own: str, exists: Callable[[str], bool]) -> bool:
    """Return whether the words are equal, or name the same file in different folders.

    If both words have the form ``--option=value``, compare the values in this way.
    """
    option, equals, value = own.partition("=")
    if equals and option.startswith("-") and word.startswith(option + equals):
        word, own = word[len(option + equals) :], value
    return word == own or (exists(own) and os.path.basename(word) == os.path.basename(own))


def _excerpts(one: str, other: str) -> tuple[str, str]:
    """Return a short excerpt from each of two texts. The excerpts contain the first difference between the texts."""
    one, other = (printable(" ".join(text.split())) for text in (one, other))
    same = len(os.path.commonprefix([one, other]))
    begin = max(0, same - _SHOWN // 2) if max(len(one), len(other)) > _SHOWN else 0
    shown = []
    for text in (one, other):
        piece = text[begin : begin + _SHOWN]
        shown.append(("..." if begin else "") + piece + ("..." if begin + len(piece) < len(text) else ""))
    return shown[0], shown[1]


def objection(
    registration: Registration, own: Registration, present: Mapping[str, object], same_flags: bool = True
) -> str:
    """Return why a host can't take part in the job, or "" if it can.

    `same_flags`: whether the host must have the same flags. A joining host needn't have them, because it gets the
    job's flags from the controller.
    """
    why = other_versions(registration.host, registration.version, registration.mindspore, own)
    if why:
        return why
    for name, value in own.flags.items() if same_flags else ():
        if registration.flags.get(name) != value:
            return (
                f"{name} is {registration.flags.get(name)} on {registration.host}, but {value} on {own.host}; give "
                "the same flags on all hosts"
            )
    if registration.host in present:
        return f"{registration.host} has already registered"
    return ""
