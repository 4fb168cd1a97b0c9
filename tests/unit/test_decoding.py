"""JSON of other processes and hosts: what is decoded, and that all else raises one exception."""

import json
import random
import sys

import pytest

from ms_kungfu._decoding import MAX_DEPTH, MalformedError, decode, decode_object
from tests.hostile import document, spoiled


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'{"a": [1, -2.5, null, true, "\\u00e9"]}', {"a": [1, -2.5, None, True, "é"]}),
        (b'"\\ud83d\\ude00 \\\\ud800"', "😀 \\ud800"),
        (str(2**64 - 1).encode(), 2**64 - 1),
        (str(-(2**63)).encode(), -(2**63)),
        (b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, None),
        (b"[" + b"[]," * 1000 + b"[]]", [[]] * 1001),
        (b'"' + b"[" * 1000 + b'"', "[" * 1000),
    ],
)
def test_decode_accepts_json(text, value):
    assert decode(text, 10_000) == (json.loads(text) if value is None else value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe[\x00]\x00", "not UTF-8"),
        (b'"\xed\xa0\x80"', "not UTF-8"),
        (b'"\\ud800"', "half of a surrogate pair"),
        (b'{"\\uDFFF": 1}', "half of a surrogate pair"),
        (b'["\\udc80"]', "half of a surrogate pair"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested more than 64 levels deep"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested more than 64 levels deep"),
        (b"[" * 50_000, "nested more than 64 levels deep"),
        (b'{"a": 1, "b": {"a": 2, "c": 3, "a": 4}}', "the name 'a' twice"),
        (str(2**64).encode(), "over 64 bits"),
        (str(-(2**63) - 1).encode(), "over 64 bits"),
        (b"9" * 5000, "over 64 bits"),
        (b"-1e999", "too large"),
        (b"[NaN]", "NaN is not JSON"),
        (b"-Infinity", "-Infinity is not JSON"),
        (b" " * 100_001, "has 100001 bytes; at most 100000 are read"),
    ],
)
def test_decode_refuses_the_rest_with_one_exception(text, why):
    with pytest.raises(MalformedError, match=why) as refused:
        decode(text, 100_000)
    assert len(str(refused.value)) < 200
    str(refused.value).encode()


def test_decode_refuses_half_a_pair_in_a_text_that_is_one():
    with pytest.raises(MalformedError, match="half of a surrogate pair"):
        decode('"\ud800"', 100)


def test_raw_bytes_are_those_of_the_system_only():
    assert decode(json.dumps("x\udc80"), 100, raw_bytes=True) == "x\udc80"
    with pytest.raises(MalformedError, match="half of a surrogate pair"):
        decode(json.dumps("x\ud800"), 100, raw_bytes=True)


def test_own_accepts_what_json_dumps_writes():
    told = {"loss": float("inf"), "state": 2**127}
    assert decode(json.dumps(told), 100, own=True) == told
    assert decode('{"1": 1, "1": 2}', 100, own=True) == {"1": 2}
    assert decode("[" * 100 + "]" * 100, 1000, own=True)
    with pytest.raises(MalformedError, match="not JSON"):
        decode(b"9" * 5000, 10_000, own=True)


@pytest.mark.parametrize("own", [False, True])
def test_deep_nesting_is_refused_whatever_the_recursion_limit(own):
    limit = sys.getrecursionlimit()
    try:
        for chosen in (limit, 1_000_000):
            sys.setrecursionlimit(chosen)
            for text in (b"[" * 300_000, b'{"a":' * 300_000, b'["\\"[", ' * 300_000):
                with pytest.raises(MalformedError, match="nested more than"):
                    decode(text, 5_000_000, own=own)
    finally:
        sys.setrecursionlimit(limit)


def test_brackets_in_texts_are_no_nesting():
    value = ["[" * 1000, {'"[' * 100: '\\"[{' * 100}]
    assert decode(json.dumps(value), 10_000) == value


def test_decode_object_refuses_other_values():
    assert decode_object(b"{}", 10) == {}
    with pytest.raises(MalformedError, match="not a JSON object"):
        decode_object(b"[]", 10)


def test_any_decoded_document_can_be_encoded():
    lots = random.Random(32)
    decoded = 0
    for number in range(3000):
        text = document(lots)
        text = text if number % 2 else spoiled(lots, text)
        try:
            value = decode(text, 1 << 20)
        except MalformedError as error:
            str(error).encode()
            continue
        decoded += 1
        repr(json.loads(json.dumps(value, allow_nan=False).encode())).encode()
    assert decoded > 300
