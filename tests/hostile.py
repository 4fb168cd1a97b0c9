"""JSON and bytes that no program of this package sends, at random: for the tests of all that listens or calls."""

from __future__ import annotations

import json
import random

NAMES = (
    "nonce", "proof", "error", "agent", "report",
    "transport_connection", "head", "ask", "welcome", "refused", "started", "exited",
    "looked", "made", "syncs", "unreachable", "status", "leave", "interrupted", "number", "message", "version",
    "attempt", "key", "pid", "beats", "progress", "gave_up", "peer", "incarnation", "member_of", "step", "software",
    "cores", "expected", "store", "standby", "cluster", "rank", "Workers", "Runners", "Version", "Slots", "kvs",
    "header", "revision", "result", "",
)  # fmt: skip


def spoiled(lots: random.Random, data: bytes) -> bytes:
    """Some bytes changed, left out or said twice; or its end cut off."""
    changed = bytearray(data)
    for _ in range(lots.randint(1, 4)):
        if not changed:
            break
        place = lots.randrange(len(changed))
        kind = lots.randrange(4)
        if kind == 0:
            changed[place] = lots.randrange(256)
        elif kind == 1:
            del changed[place : place + lots.randint(1, 20)]
        elif kind == 2:
            changed[place:place] = changed[max(0, place - 20) : place]
        else:
            del changed[place:]
    return bytes(changed)


def text(lots: random.Random) -> str:
    """Of all of Unicode: also controls, halves of surrogate pairs, and what means something to a terminal or a path."""
    kind = lots.randrange(6)
    if kind == 0:
        return lots.choice(("", "\0", "é\0x", "../../x", "\x1b[2J", "\n", "%s%n", "\ufeff", "\u202e", "9" * 5000))
    if kind == 1:
        return "".join(chr(lots.randrange(0xD800, 0xE000)) for _ in range(lots.randint(1, 3)))
    if kind == 2:
        return lots.randbytes(lots.choice((16, 32))).hex()
    if kind == 3:
        return f"127.0.0.1:{lots.randint(-1, 70000)}"
    return "".join(chr(lots.randrange(0x110000)) for _ in range(lots.randrange(12)))


def number(lots: random.Random) -> str:
    """As JSON writes it, also what it doesn't allow."""
    kind = lots.randrange(5)
    if kind == 0:
        return str(lots.randint(-2, 3))
    if kind == 1:
        return str(lots.choice((-1, 1)) * (1 << lots.choice((31, 32, 53, 63, 64, 70))) + lots.randint(-1, 1))
    if kind == 2:
        return lots.choice(("NaN", "Infinity", "-Infinity", "1e999", "-0", "1E+4", "1e-999", "9" * 4500, "0.1"))
    return repr(lots.uniform(-1, 1) * 10 ** lots.randint(-300, 300))


def document(lots: random.Random, depth: int = 0) -> bytes:
    """JSON, or nearly: of any nesting, with any texts and numbers, and names given twice."""
    if depth == 0 and lots.random() < 0.03:
        deep = lots.choice((10, 63, 64, 65, 300, 900, 5000))
        inner = lots.choice((b"1", b"", document(lots, 3)))
        opening, closing = lots.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'[{"ask":', b"}]")))
        return opening * deep + inner + closing * lots.choice((deep, 0))
    kind = lots.randrange(10 if depth < 4 else 6)
    if kind < 2:
        return lots.choice((b"null", b"true", b"false"))
    if kind < 4:
        return number(lots).encode()
    if kind < 6:
        return _written(lots, text(lots))
    if kind == 6:
        return b"[" + b",".join(document(lots, depth + 1) for _ in range(lots.randrange(4))) + b"]"
    return message(lots, {}, depth)


def message(lots: random.Random, proper: dict[str, object], depth: int = 0) -> bytes:
    """An object: `proper`, with some fields of other types, some left out, some more and some given twice."""
    fields = [(name, json.dumps(value).encode()) for name, value in proper.items() if lots.random() < 0.9]
    fields = [(name, value if lots.random() < 0.7 else document(lots, depth + 1)) for name, value in fields]
    for _ in range(lots.randrange(4)):
        fields.append((text(lots) if lots.random() < 0.2 else lots.choice(NAMES), document(lots, depth + 1)))
    if fields and lots.random() < 0.1:
        fields.append(lots.choice(fields))
    return b"{" + b",".join(_written(lots, name) + b":" + value for name, value in fields) + b"}"


def mutated(lots: random.Random, value: object, rate: float = 0.05) -> bytes:
    """`value` in JSON, of which any part is something else now and then."""
    if lots.random() < rate:
        return document(lots, 1)
    if isinstance(value, dict):
        fields = [(name, mutated(lots, each, rate)) for name, each in value.items() if lots.random() < 1 - rate / 2]
        fields += [(lots.choice(NAMES), document(lots, 2))] * (lots.random() < rate)
        return b"{" + b",".join(_written(lots, name) + b":" + each for name, each in fields) + b"}"
    if isinstance(value, (list, tuple)):
        return b"[" + b",".join(mutated(lots, each, rate) for each in value) + b"]"
    return json.dumps(value).encode()


def _written(lots: random.Random, text: str) -> bytes:
    """With escapes, or in UTF-8 as it is, surrogates, too."""
    return json.dumps(text, ensure_ascii=lots.random() < 0.5).encode("utf-8", "surrogatepass")
