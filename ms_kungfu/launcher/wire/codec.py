"""Encode messages as UTF-8 JSON; `msgspec` decodes JSON and validates it against the classes in `messages`.

Every fault in another process's message raises `ProtocolError`, into which three exceptions of `msgspec` are converted.
`msgspec` rejects NaN, infinities, integers over 64 bits and unpaired surrogates. If an object contains a name twice,
the last value counts. The nesting depth is checked before decoding: if the program has raised Python's recursion limit,
deep nesting would crash the process.
"""

from __future__ import annotations

import functools
from typing import Any, Generic, TypeVar

import msgspec

from ms_kungfu._decoding import MalformedError, ProtocolError, check_depth
from ms_kungfu._words import printable

T = TypeVar("T")
_MAX_SHOWN = 200


class Reads(Generic[T]):
    """Decode one message, or one of several kinds of messages, that a protocol expects at one point."""

    def __init__(self, kinds: Any) -> None:
        self.kinds = kinds

    @functools.cached_property
    def _decoder(self) -> msgspec.json.Decoder[T]:
        return msgspec.json.Decoder(self.kinds)

    def __call__(self, data: bytes) -> T:
        """Decode a message. Raises ProtocolError and no other exception."""
        try:
            check_depth(data)
            return self._decoder.decode(data)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a message is malformed: {_words_of(error)}") from None

    def convert(self, value: object) -> T:
        """Validate JSON that has already been decoded."""
        try:
            return msgspec.convert(value, self.kinds)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(_words_of(error)) from None


def _words_of(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    if isinstance(error, (MalformedError, msgspec.MsgspecError)):
        return printable(str(error)[:_MAX_SHOWN])
    return "it is nested too deep" if isinstance(error, RecursionError) else printable(repr(error)[:_MAX_SHOWN])


def encode(message: msgspec.Struct) -> bytes:
    """Return the message as JSON. Characters that UTF-8 can't encode, e.g. from a system error, become "?"."""
    try:
        return msgspec.json.encode(message)
    except UnicodeEncodeError:
        return msgspec.json.encode(_encodable(msgspec.to_builtins(message)))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_encodable(name): _encodable(each) for name, each in value.items()}
    return [_encodable(each) for each in value] if isinstance(value, (list, tuple)) else value
