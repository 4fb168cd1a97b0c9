"""Decode JSON that another process, host or user has written.

`json.loads` accepts values that cause errors later in this package: a string with a lone surrogate can't be encoded,
10**400 can't be converted to a float, and NaN can't be compared. For deeply nested documents, `json.loads` raises
RecursionError. `decode` raises a single exception class, `MalformedError`, in all of these cases.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_DEPTH = 64
_MAX_OWN_DEPTH = 256
_MAX_SHOWN = 80
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# Matches a string, or a bracket outside of strings. The closing quote is optional, so that an unterminated string is
# scanned only once.
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{\]}]', re.DOTALL)


class MalformedError(ValueError):
    """The data isn't JSON, or is JSON that this package rejects. The message contains the reason."""


class ProtocolError(Exception):
    """The peer violates the protocol, or isn't the expected peer."""


def decode(data: bytes | str, limit: int, *, raw_bytes: bool = False, own: bool = False) -> Any:
    """Decode a JSON document.

    Args:
        data: a JSON document, as UTF-8 bytes or as str.
        limit: the largest accepted size of `data`, in bytes (for str: in characters).
        raw_bytes: whether to accept the characters U+DC80 to U+DCFF, which Python uses for invalid UTF-8 bytes in
            strings of the operating system. Set this only for environments, commands and paths from a process of this
            job.
        own: whether to accept everything that `json.dumps` writes: NaN, infinities, integers of more than 64 bits,
            repeated keys, and up to 256 nested containers. Set this only for files that this package has written.

    Returns:
        A value that consists only of dict, list, str, int, float, bool and None. All strings can be encoded as UTF-8,
        unless `raw_bytes` is set. Unless `own` is set, at most `MAX_DEPTH` containers are nested, each integer has at
        most 64 bits, and each float is finite.

    Raises:
        MalformedError: if the data isn't JSON, or if the value would break these limits. No other exception is raised.
    """
    if len(data) > limit:
        raise MalformedError(f"it has {len(data)} bytes; at most {limit} are read")
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        # Check the depth first: deep nesting would crash `json.loads` if the program has raised Python's recursion
        # limit.
        _check_depth(text, _MAX_OWN_DEPTH if own else MAX_DEPTH)
        if own:
            value = json.loads(text)
        else:
            value = json.loads(
                text, object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant
            )
    except MalformedError:
        raise
    except RecursionError:  # the caller's own stack is almost as deep as Python's limit
        raise MalformedError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise MalformedError("it is not UTF-8") from None
    except ValueError as error:
        raise MalformedError(f"it is not JSON: {error}") from None
    # A document in UTF-8 contains no surrogates, so a lone surrogate can only come from an escape sequence.
    if _SURROGATE.search(text) or not (isinstance(data, bytes) or text.isascii()):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape" if raw_bytes else "strict")
        except (UnicodeEncodeError, RecursionError):
            raise MalformedError("a string has half of a surrogate pair") from None
    return value


def check_depth(data: bytes) -> None:
    """Raise MalformedError if more than `MAX_DEPTH` containers are nested."""
    _check_depth(
        data.decode("latin-1"), MAX_DEPTH
    )  # in UTF-8, no byte of a multibyte character is a bracket or a quote


def decode_object(data: bytes | str, limit: int, *, raw_bytes: bool = False, own: bool = False) -> dict[str, Any]:
    """Decode a JSON document as `decode` does. Raise MalformedError if it isn't a JSON object."""
    value = decode(data, limit, raw_bytes=raw_bytes, own=own)
    if not isinstance(value, dict):
        raise MalformedError("it is not a JSON object")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise MalformedError(f"an object has the name {ascii(name)[:_MAX_SHOWN]} twice")
    return value


def _integer(text: str) -> int:
    if len(text) <= 20:
        number = int(text)
        if -(1 << 63) <= number < 1 << 64:
            return number
    raise MalformedError(f"the number {text[:_MAX_SHOWN]} has over 64 bits")


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise MalformedError(f"the number {text[:_MAX_SHOWN]} is too large")
    return number


def _constant(text: str) -> float:
    raise MalformedError(f"{text} is not JSON")


def _check_depth(text: str, limit: int) -> None:
    if text.count("{") + text.count("[") <= limit:
        return  # with so few brackets, the nesting can't be too deep
    depth = 0
    for token in _TOKEN.finditer(text):
        if token[0] in "[{":
            depth += 1
            if depth > limit:
                raise MalformedError(f"it is nested more than {limit} levels deep")
        elif token[0] in "]}":
            depth -= 1
