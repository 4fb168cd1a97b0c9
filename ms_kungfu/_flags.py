"""Parse command lines in the style of Go's flag package, which KungFu's users know. The parser is based on argparse.

A flag begins with one or two dashes and is written ``-name value`` or ``-name=value``. A switch needs no value: ``-q``
means ``-q=true``, and ``-q=false`` turns the switch off. The flags end at ``--`` or at the first word that isn't a
flag, so the flags of the program to run aren't parsed. Plain argparse parses ``-worker`` as ``-w orker``, and accepts
abbreviations. This parser raises an error for an unknown flag, and suggests the most similar known flag.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NoReturn

_UNIT_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class UsageError(Exception):
    """An invalid command line; the message is for the user."""


def failed(program: str, error: object, code: int) -> int:
    """Print the error that ends the program, and return `code`, the exit status."""
    print(f"{program}: {error}", file=sys.stderr)
    return code


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser for flags in Go's style."""

    def __init__(self, prog: str, usage: str, description: str, refused: Mapping[str, str] | None = None) -> None:
        """`refused`: flags that users know from other programs or commands, each with the reason for its rejection."""
        super().__init__(prog, usage, description, add_help=False, allow_abbrev=False)
        self._is_switch: dict[str, bool] = {}
        self._optional: dict[str, re.Pattern[str]] = {}  # a flag that needs no value -> the pattern of its values
        self.given: set[str] = set()  # the names of the flags in the command line
        self.spelled: list[str] = []  # the same flags in the form -name=value
        self._refused = refused or {}
        self.flag("h", "show this help", type=switch)
        self.flag("help", argparse.SUPPRESS, type=switch)

    def flag(
        self, name: str, help: str, *, type: Callable[[str], Any] = str, metavar: str = "", optional: str = "",
        **more: Any,
    ) -> None:  # fmt: skip
        """Add a flag. `more`: as in `add_argument`.

        A flag of type `switch` needs no value. With the regular expression `optional`, the flag needs no value either:
        the next word is the flag's value only if the word matches `optional`.
        """
        if optional:
            self._optional[name] = re.compile(optional)
        # Don't use nargs="?": a switch would then consume the next word, for example the program's name. Instead,
        # `parse` passes a value for each flag.
        self._is_switch[name] = type is switch
        self.add_argument(f"-{name}", help=help, type=type, metavar=metavar, **more)

    def parse_among(self, arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
        """Return the flags and the words of a command. The flags may come before, between or after the words."""
        flags, rest = self.parse(arguments)
        words: list[str] = []
        while rest:
            words.append(rest[0])
            flags, rest = self.parse(rest[1:], flags)
        return flags, words

    def parse(self, arguments: Sequence[str], flags: Namespace | None = None) -> tuple[Namespace, list[str]]:
        """Return the flags, and the words after them. If `flags` from an earlier call is given, add the flags to it.

        Raise UsageError if the command line is invalid. ``-h`` prints the help and ends the program.
        """
        spelled = self.spelled = []
        words = list(arguments)
        while words:
            word = words[0]
            if word == "--":
                words.pop(0)
                break
            if not word.startswith("-") or word == "-":
                break
            words.pop(0)
            name, has_value, value = word[2 if word.startswith("--") else 1 :].partition("=")
            if name in self._refused:
                raise UsageError(f"-{name}: {self._refused[name]}")
            if name not in self._is_switch:
                near = difflib.get_close_matches(name, self._is_switch, n=1, cutoff=0.5)
                remedy = f"did you mean -{near[0]}?" if near else f"{self.prog} -help lists the flags"
                raise UsageError(f"unknown flag {word.partition('=')[0]}; {remedy}")
            if not has_value:
                if self._is_switch[name]:
                    value = "true"
                elif name in self._optional and not (words and self._optional[name].fullmatch(words[0])):
                    value = ""
                elif words:
                    value = words.pop(0)
                else:
                    raise UsageError(f"flag -{name} needs a value")
            spelled.append(f"-{name}={value}")
            self.given.add(name)
        flags = self.parse_args(spelled, flags)
        if flags.h or flags.help:
            self.print_help()
            self.exit()
        del flags.h, flags.help
        return flags, words

    def error(self, message: str) -> NoReturn:
        raise UsageError(re.sub(r"^argument ", "", message))


def switch(text: str) -> bool:
    """Return the truth value that a flag's text represents."""
    if text.lower() in ("1", "t", "true"):
        return True
    if text.lower() in ("0", "f", "false"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return an argparse type for whole numbers from `low` to `high`."""

    def parse(text: str) -> int:
        if not re.fullmatch("[+-]?[0-9]+", text):  # int() alone accepts "1_0" and non-ASCII digits
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
        value = int(text)
        if value < low or (high is not None and value > high):
            limits = f"from {low} to {high}" if high is not None else f"at least {low}"
            raise argparse.ArgumentTypeError(f"{value} is out of range; it must be {limits}")
        return value

    return parse


def duration(text: str) -> float:
    """Return a duration in seconds. Accept Go's format (``"1h30m"``, ``"1.5s"``, ``"200ms"``) or a plain number."""
    parts = re.findall(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h)", text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)
    if re.fullmatch(r"[0-9]+(\.[0-9]*)?", text):
        return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a duration; write it like 30s, 5m or 1h30m")
