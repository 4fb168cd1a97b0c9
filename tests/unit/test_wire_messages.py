"""Every message between processes: what is accepted, and that all else is refused by one exception.

``KUNGFU_FUZZ`` says how many messages of each kind are tried, ``KUNGFU_FUZZ_SEED`` which.
"""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path
from typing import Union, get_args

import msgspec
import pytest
from msgspec import inspect

from ms_kungfu._decoding import ProtocolError
from ms_kungfu.launcher.agent import agent
from ms_kungfu.launcher.controller import broker, remote_agent
from ms_kungfu.launcher.wire import documents as d
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.wire import page
from ms_kungfu.launcher.wire.codec import Reads, encode
from tests import hostile

TRIES = int(os.environ.get("KUNGFU_FUZZ", 100))
KINDS = [kind for kind in vars(m).values() if isinstance(kind, type) and issubclass(kind, m.Message)][1:]
ANY = Reads(Union[tuple(KINDS)])
PROPER = {
    str: ("", "why", "é\u202e", "x" * 300),
    m.Nonce16: ("0123456789abcdef" * 2,), m.Proof32: ("0123456789abcdef" * 4,),
    m.HostName: ("a", "[fd00::1]", "10.0.0.1"), m.LogName: ("b.10000", "é"),
}  # fmt: skip
BY_PATTERN = {inspect.type_info(kind).pattern: texts for kind, texts in PROPER.items() if kind is not str}


@pytest.fixture
def lots():
    return random.Random(int(os.environ.get("KUNGFU_FUZZ_SEED", 32)))


def number(lots, kind):
    least = kind.ge if kind.ge is not None else -(1 << 63)
    most = kind.le if kind.le is not None else (1 << 64) - 1 if kind.lt is None else kind.lt - 1
    return lots.choice((least, most, lots.randint(least, most), max(least, min(most, 3))))


def value(lots, kind):
    """What a type accepts, at random: also the ends of its range."""
    some = lots.randint(getattr(kind, "min_length", None) or 0, 3)
    if isinstance(kind, inspect.Metadata):
        return value(lots, kind.type)
    if isinstance(kind, inspect.IntType):
        return number(lots, kind)
    if isinstance(kind, inspect.FloatType):
        return (
            lots.choice((0.0, -1.5, 1e300, float(lots.randint(-9, 9)))) if kind.le is None else lots.uniform(0, kind.le)
        )
    if isinstance(kind, inspect.StrType):
        if kind.pattern and kind.pattern.endswith(m._PORT + r"\Z"):
            return f"127.0.0.1:{lots.randint(1, 65535)}"
        texts = BY_PATTERN[kind.pattern] if kind.pattern else PROPER[str]
        return lots.choice([text for text in texts if len(text) <= (kind.max_length or len(text))])
    if isinstance(kind, inspect.BytesType):
        return lots.randbytes(some)
    if isinstance(kind, inspect.BoolType):
        return lots.random() < 0.5
    if isinstance(kind, inspect.NoneType):
        return None
    if isinstance(kind, inspect.LiteralType):
        return lots.choice(kind.values)
    if isinstance(kind, inspect.UnionType):
        return value(lots, lots.choice(kind.types))
    if isinstance(kind, inspect.TupleType):
        return tuple(value(lots, each) for each in kind.item_types)
    if isinstance(kind, (inspect.ListType, inspect.VarTupleType)):
        each = [value(lots, kind.item_type) for _ in range(some)]
        return each if isinstance(kind, inspect.ListType) else tuple(dict.fromkeys(each))
    if isinstance(kind, inspect.DictType):
        return {value(lots, kind.key_type): value(lots, kind.value_type) for _ in range(some)}
    if isinstance(kind, inspect.StructType):
        given = [field for field in kind.fields if field.required or lots.random() < 0.7]
        values = {field.name: value(lots, field.type) for field in given}
        if kind.cls is d.Versions:  # what is chosen is one of them
            values["chosen"] = lots.choice([None, *(cluster.version for cluster in values["clusters"])])
        return kind.cls(**values)
    assert isinstance(kind, inspect.AnyType), kind
    return lots.choice((None, 1, "x", [True, {"a": 0.5}]))


@pytest.mark.parametrize("kind", [*KINDS, d.LeaderSnapshotDocument, d.Status], ids=lambda kind: kind.__name__)
def test_message_at_random_is_itself_again_or_refused(kind, lots):
    taken, refused = [], []
    reads = ANY if kind in KINDS else Reads(kind)
    for _ in range(TRIES):
        proper = value(lots, inspect.type_info(kind))
        data = encode(proper)
        assert reads(data) == proper == reads.convert(msgspec.to_builtins(proper))
        for changed in (hostile.mutated(lots, msgspec.to_builtins(proper), 0.15), hostile.spoiled(lots, data)):
            try:
                found = reads(changed)
            except ProtocolError as error:
                refused.append(str(error))
            else:
                taken.append(found)
    assert all(why.isprintable() and len(why) < 300 for why in refused)
    assert all(reads(encode(found)) == found for found in taken)
    assert len(refused) > TRIES // 5
    assert taken


def test_messages_of_all_kinds_survive_a_collection_of_garbage(lots):
    """msgspec crashes in it by some types (`Terms.flags`). Once: it takes long in a process that has all tests."""
    kept = [ANY(encode(value(lots, inspect.type_info(kind)))) for kind in KINDS for _ in range(10)]
    gc.collect()
    assert len(kept) == 10 * len(KINDS)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", ""),
        (b"\xff", "it is not UTF-8"),
        (b'{"type": "ends", "why": "\xff"}', "it is not UTF-8"),
        (b'{"type": "ends", "why": "\xed\xa0\x80"}', "it is not UTF-8"),
        (b'{"type": "ends", "why": "\\ud800"}', ""),
        (b'{"type": "ends", "why": "\\udc80."}', ""),
        (b'{"type": "ends", "why": "w", "more": 1}', ""),
        (b'{"type": "ends"}', ""),
        (b'{"why": "w"}', ""),
        (b'{"type": "no\\u001b[2J", "why": "w"}', ""),
        (b'{"type": "hung_up", "number": %s}' % (b"9" * 5000), ""),
        (b'{"type": "hung_up", "number": -1}', ""),
        (b'{"type": "hung_up", "number": 1.5}', ""),
        (b'{"type": "hung_up", "number": true}', ""),
        (b'{"type": "looked", "beats": {}, "cores": [], "now": NaN}', ""),
        (b'{"type": "looked", "beats": {}, "cores": [], "now": 1e999}', ""),
        (b"[" * 100_000, "nested more than 64 levels deep"),
        (b'{"x": ' * 100_000, "nested more than 64 levels deep"),
    ],
)
def test_message_with_one_mistake_is_rejected(data, reason):
    """Only this package's own reasons are compared: the text of the others belongs to `msgspec`."""
    with pytest.raises(ProtocolError, match=f"a message is malformed: .*{reason}") as error:
        m.FROM_HOST(data)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "data",
    [
        b'{"type": "ends", "why": "w"}',
        b'{"type": "ends", "why": "%s"}' % (b"[" * 1000),
        b'{"type": "hung_up", "number": 1}',
        b'{"type": "hung_up", "number": 1, "number": 2}',
        b'{"type": "looked", "beats": {}, "cores": [], "now": 1.5}',
    ],
)
def test_valid_messages_are_accepted(data):
    m.FROM_HOST(data)


class _OldDecoder:
    """As in `msgspec` before 0.21, the newest version for Python 3.9: its errors aren't ValueErrors."""

    def decode(self, data):
        raise msgspec.MsgspecError("JSON is malformed")


def test_errors_of_old_msgspec_versions_become_protocol_errors(monkeypatch):
    reads = Reads(m.Ends)
    monkeypatch.setitem(reads.__dict__, "_decoder", _OldDecoder())
    with pytest.raises(ProtocolError, match="a message is malformed: JSON is malformed"):
        reads(b"{}")
    monkeypatch.setattr(msgspec, "convert", lambda value, kinds: _OldDecoder().decode(value))
    with pytest.raises(ProtocolError, match="JSON is malformed"):
        reads.convert({})


def test_page_of_messages_is_current():
    """`python -m ms_kungfu.launcher.wire.page > docs/messages.md` writes it."""
    page_file = Path(__file__).resolve().parents[2] / "docs" / "messages.md"
    assert page_file.read_text(encoding="utf-8") == page.to_markdown()


def test_text_that_utf8_has_not_is_sent_without_it():
    assert m.FROM_HOST(encode(m.Ends("in /tmp/\udcff"))) == m.Ends("in /tmp/?")


def test_every_message_is_expected_somewhere_and_has_a_handler():
    expected = {kind for reads in vars(m).values() if isinstance(reads, Reads) for kind in get_args(reads.kinds)}
    expected |= {reads.kinds for reads in vars(m).values() if isinstance(reads, Reads) and not get_args(reads.kinds)}
    assert expected >= set(KINDS)
    assert {*remote_agent._AT_ANY_TIME, *remote_agent._OF_WORKERS, *remote_agent._OF_A_VERSION} == set(
        get_args(m.FromHost)
    )
    assert set(broker._SERVED) == set(get_args(m.ToJobBroker))
    assert set(get_args(m.FromController)) == {*agent.HEARD, *agent.OBEYED, *agent.OF_A_VERSION}
