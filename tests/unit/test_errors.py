"""Messages of the runtime become the exceptions that they name."""

from __future__ import annotations

import pytest

from ms_kungfu import errors


@pytest.mark.parametrize(
    "name",
    [
        "CollectiveMismatchError",
        "PeerLostError",
        "CollectiveTimeoutError",
        "CollectiveAbortedError",
        "StaleClusterError",
        "ResizeError",
        "ConfigServerError",
        "InternalError",
    ],
)
def test_a_message_becomes_the_error_that_it_names(name: str) -> None:
    error = errors.from_message(f"{name}: rank 2 (10.0.0.5:9001): gone")
    assert type(error) is getattr(errors, name)
    assert str(error) == "rank 2 (10.0.0.5:9001): gone"
    assert isinstance(error, errors.KungFuError)


@pytest.mark.parametrize("kind", [ValueError, TypeError])
def test_invalid_use_becomes_a_builtin_error(kind: type[Exception]) -> None:
    error = errors.from_message(f"{kind.__name__}: root 3 is not a rank of a cluster of 2")
    assert type(error) is kind
    assert str(error) == "root 3 is not a rank of a cluster of 2"


@pytest.mark.parametrize("text", ["", "no name at all", "OSError: disk", "PeerLostError", "KeyboardInterrupt: x"])
def test_an_unknown_message_is_a_broken_invariant_and_is_kept_whole(text: str) -> None:
    error = errors.from_message(text)
    assert type(error) is errors.InternalError
    assert str(error) == text


def test_errors_can_be_caught_as_the_builtin_they_specialise() -> None:
    assert issubclass(errors.CollectiveMismatchError, ValueError)
    assert issubclass(errors.CollectiveTimeoutError, TimeoutError)
