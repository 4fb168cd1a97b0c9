"""What a host's launcher says of itself when it comes to the head, and what the head has against it. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Callable

from ms_kungfu._words import printable
from ms_kungfu.broker_protocol import ProtocolError
from ms_kungfu.launcher.devices import ASCEND, GPU, Device, Devices
from ms_kungfu.launcher.options import PROGRAM, Options

# What each host may have its own way, or only one of them has.
_OF_EACH_HOST = {"command", "quiet", "show_workers", "logdir", "logfile", "builtin_port", "secret", "delay_s", "hosts"}
_SHOWN = 160  # characters of a command that differs
OF_THE_JOB = [each.name for each in fields(Options) if each.metadata and each.name not in _OF_EACH_HOST]


@dataclass(frozen=True)
class Hello:
    """`flags`: those that have to be the same on all hosts, as text. `mindspore`: its version, "" without."""

    host: str
    version: str
    mindspore: str
    flags: dict[str, str]
    cores: list[int]
    devices: Devices
    logdir: str

    def to_json(self) -> dict[str, Any]:
        kind = self.devices.kind
        each = [vars(device) for device in self.devices.each]
        return {**vars(self), "devices": {"kind": None if kind is None else kind.name, "each": each}}

    @classmethod
    def from_json(cls, message: Any) -> Hello:
        """ProtocolError where it can't be that."""
        try:
            hello = cls(**{**message, "devices": _devices_from(message["devices"])})
            texts = [hello.host, hello.version, hello.mindspore, hello.logdir, *hello.flags, *hello.flags.values()]
            if not all(isinstance(text, str) for text in texts) or not all(type(core) is int for core in hello.cores):
                raise ValueError("texts and numbers")
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ProtocolError(f"a host introduces itself wrongly: {error!r}") from None
        if not hello.cores:
            raise ProtocolError(f"{hello.host} has no cores")
        return hello


def _devices_from(message: Mapping[str, Any]) -> Devices:
    kinds = {kind.name: kind for kind in (GPU, ASCEND)}
    kind = None if message["kind"] is None else kinds[message["kind"]]
    each = tuple(Device(**fields) for fields in message["each"])
    if any(not isinstance(device.device_id, int) for device in each):
        raise ValueError("a device has a number")
    return Devices(kind, each)


def flags_of(options: Options) -> dict[str, str]:
    """Those that mean something for the whole job, by their names on the command line."""
    found = {
        f"-{each.metadata['name']}": str(getattr(options, each.name))
        for each in fields(Options)
        if each.name in OF_THE_JOB
    }
    return {**found, "-H": str(options.hosts), "-H's head": options.hosts.head.name}


def other_versions(host: str, version: str, mindspore: str, own: Hello) -> str:
    """What speaks against a host that has these; "" where it has the same."""
    if version != own.version:
        return f"ms_kungfu is {version} on {host}, {own.version} on {own.host}; install the same on all hosts"
    if mindspore != own.mindspore:
        return (
            f"MindSpore is {mindspore or 'not installed'} on {host}, {own.mindspore or 'not installed'} on {own.host}; "
            "install the same on all hosts"
        )
    return ""


def other_command(
    host: str, command: Sequence[str], own_host: str, own: Sequence[str], exists: Callable[[str], bool] = os.path.exists
) -> str:
    """What is to be said where a host runs something else than this one; "" where both run the same. No objection:
    where a host has its interpreter and its files is its own affair, and nobody can tell what else may rightly differ.

    `exists`: whether this host has such a file. The other host's can't be looked at from here.
    """
    words, own_words = list(command)[1:], list(own)[1:]
    if len(words) == len(own_words) and all(_alike(*pair, exists) for pair in zip(words, own_words)):
        return ""
    theirs, ours = _excerpts(" ".join(command), " ".join(own))
    return f'{host} runs "{theirs}", and {own_host} "{ours}": all hosts should train alike'


def _alike(word: str, own: str, exists: Callable[[str], bool]) -> bool:
    """The same word, or the same file in another folder, also behind an option's ``=``."""
    option, equals, value = own.partition("=")
    if equals and option.startswith("-") and word.startswith(option + equals):
        word, own = word[len(option + equals) :], value
    return word == own or (exists(own) and os.path.basename(word) == os.path.basename(own))


def _excerpts(one: str, other: str) -> tuple[str, str]:
    """Of two texts that differ: both as a line of moderate length that has the place where they do."""
    one, other = (printable(" ".join(text.split())) for text in (one, other))
    same = len(os.path.commonprefix([one, other]))
    begin = max(0, same - _SHOWN // 2) if max(len(one), len(other)) > _SHOWN else 0
    shown = []
    for text in (one, other):
        piece = text[begin : begin + _SHOWN]
        shown.append(("..." if begin else "") + piece + ("..." if begin + len(piece) < len(text) else ""))
    return shown[0], shown[1]


def objection(hello: Hello, own: Hello, present: Mapping[str, object], same_flags: bool = True) -> str:
    """Why a host can't take part in the job; "" where it can. `same_flags`: it was given the job's flags itself."""
    why = other_versions(hello.host, hello.version, hello.mindspore, own)
    if why:
        return why
    for name, value in own.flags.items() if same_flags else ():
        if hello.flags.get(name) != value:
            return (
                f"{PROGRAM} was told {name} {hello.flags.get(name)} on {hello.host}, and {value} on {own.host}; give "
                "the same flags on all hosts"
            )
    if hello.host in present:
        return f"{hello.host} is there already"
    return ""
