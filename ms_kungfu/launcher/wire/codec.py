"""Encode messages as UTF-8 JSON; `msgspec` decodes JSON and validates it against the classes in `messages`.

Every fault in another process's message raises `ProtocolError`. `msgspec` rejects NaN, infinities, integers of more
than 64 bits, and unpaired surrogates. If an object contains a key twice, the last value counts. The nesting depth is
checked before decoding, because deep nesting would crash the process if the program has increased Python's recursion
limit.
"""

from __future__ import annotations

import functools
from typing import Any, Generic, TypeVar

import msgspec

from ms_kungfu._decoding import MalformedError, ProtocolError, check_depth
from ms_kungfu._words import printable

T = TypeVar("T")
# What `msgspec` raises for a document that it rejects. Its DecodeError isn't a ValueError before version 0.21.
DECODING_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)
_MAX_SHOWN = 200


class Reads(Generic[T]):
    """A decoder for the kinds of messages that the protocol allows at one point. `kinds`: a class, or a union."""

    def __init__(self, kinds: Any) -> None:
        self.kinds = kinds

    @functools.cached_property
    def _decoder(self) -> msgspec.json.Decoder[T]:
        return msgspec.json.Decoder(self.kinds)

    def __call__(self, data: bytes) -> T:
        """Decode a message. Raise ProtocolError, and no other exception, if it is invalid."""
        try:
            check_depth(data)
            return self._decoder.decode(data)
        except DECODING_ERRORS as error:
            raise ProtocolError(f"a message is malformed: {_reason(error, data)}") from None

    def convert(self, value: object) -> T:
        """Validate an object that has already been decoded from JSON, and convert it to a message."""
        try:
            return msgspec.convert(value, self.kinds)
        except DECODING_ERRORS as error:
            raise ProtocolError(_reason(error)) from None


def _reason(error: Exception, data: bytes = b"") -> str:
    try:
        data.decode()
    except UnicodeDecodeError:
        return "it is not UTF-8"
    if isinstance(error, (MalformedError, msgspec.MsgspecError)):
        return printable(str(error)[:_MAX_SHOWN])
    return "it is nested too deep" if isinstance(error, RecursionError) else printable(repr(error)[:_MAX_SHOWN])


def encode(message: msgspec.Struct) -> bytes:
    """Return the message as JSON. Replace characters that UTF-8 can't encode (for example in a system error) by "?"."""
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
