"""The table of environment variables parses what it documents, refuses the rest by name, and is what the docs show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ms_kungfu import env

ROOT = Path(__file__).resolve().parents[2]


def test_defaults_hold_for_unset_and_empty_variables() -> None:
    for environ in ({}, {v.name: "" for v in env.VARIABLES}):
        assert env.SELF.get(environ) is None
        assert env.INCARNATION.get(environ) == 0
        assert env.WATCH.get(environ) is False
        assert env.COLLECTIVE_TIMEOUT.get(environ) == 600.0
        assert env.JOIN_TIMEOUT.get(environ) == 300.0
        assert env.PORT_RANGE.get(environ) is None


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        (env.SELF, "127.0.0.1:10000", "127.0.0.1:10000"),
        (env.INCARNATION, "12", 12),
        (env.JOB_SECRET, "00ffA1", "00ffA1"),
        (env.WATCH, "1", True),
        (env.WATCH, "0", False),
        (env.HOSTS, "127.0.0.1:4", {"127.0.0.1": 4}),
        (env.HOSTS, "a:1,b:2", {"a": 1, "b": 2}),
        (env.PORT_RANGE, "10000-10002", range(10000, 10003)),
        (env.PORT_RANGE, "5-5", range(5, 6)),
        (env.COLLECTIVE_TIMEOUT, "0.5", 0.5),
        (env.CONFIG_SERVER, "http://127.0.0.1:9100/config", "http://127.0.0.1:9100/config"),
    ],
)
def test_documented_text_is_parsed(variable: env.Variable[Any], text: str, value: object) -> None:
    assert variable.get({variable.name: text}) == value


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        (env.INCARNATION, "-1"),
        (env.INCARNATION, "1_0"),
        (env.INCARNATION, "two"),
        (env.WATCH, "yes"),
        (env.HOSTS, "127.0.0.1"),
        (env.HOSTS, "a:1,a:2"),
        (env.HOSTS, "a:-1"),
        (env.PORT_RANGE, "10000"),
        (env.PORT_RANGE, "10-9"),
        (env.PORT_RANGE, "0-9"),
        (env.PORT_RANGE, "1-65536"),
        (env.COLLECTIVE_TIMEOUT, "0"),
        (env.COLLECTIVE_TIMEOUT, "nan"),
        (env.COLLECTIVE_TIMEOUT, "inf"),
        (env.COLLECTIVE_TIMEOUT, "2.1e6"),
        (env.JOIN_TIMEOUT, "5min"),
        (env.CONFIG_SERVER, "127.0.0.1:9100"),
    ],
)
def test_wrong_text_is_refused_by_name(variable: env.Variable[Any], text: str) -> None:
    with pytest.raises(ValueError, match=variable.name) as error:
        variable.get({variable.name: text})
    assert variable.kind.expected in str(error.value)
    assert repr(text) in str(error.value)


def test_a_secret_is_never_shown() -> None:
    with pytest.raises(ValueError, match="KUNGFU_JOB_SECRET") as error:
        env.JOB_SECRET.get({"KUNGFU_JOB_SECRET": "hunter2"})
    assert "hunter2" not in str(error.value)


def test_the_process_environment_is_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUNGFU_COLLECTIVE_TIMEOUT", "7")
    assert env.COLLECTIVE_TIMEOUT.get() == 7.0
    monkeypatch.setenv("KUNGFU_COLLECTIVE_TIMEOUT", "8")
    assert env.COLLECTIVE_TIMEOUT.get() == 8.0


def test_the_documentation_is_up_to_date() -> None:
    assert (ROOT / "docs" / "environment.md").read_text(encoding="utf-8") == env.to_markdown()


def test_pages_name_only_variables_of_the_table() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    of_kungfu_and_tests = {"KUNGFU_CONFIG_ENABLE_MONITORING", "KUNGFU_FAULTS", "KUNGFU_TEST_CUDA", "KUNGFU_TEST_TLS"}
    documented = set(re.findall(r"KUNGFU_[A-Z_]*[A-Z]", text)) - of_kungfu_and_tests
    assert documented <= {v.name for v in env.VARIABLES}
