"""How TCP paces what hosts send each other."""

import socket

import pytest

from ms_kungfu.launcher import pacing
from ms_kungfu.launcher.machine import Machine


def _goes_by(connection: socket.socket, name: bytes) -> None:
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
    except OSError:
        pytest.skip(f"this kernel has no {name.decode()}, or doesn't allow it")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch):
    """Two ends of a connection on a system that has BBR for all."""
    with socket.socket() as probe:
        _goes_by(probe, b"bbr")
        _goes_by(probe, b"cubic")
    monkeypatch.setattr(pacing, "of_the_system", lambda: b"bbr")
    with socket.socket() as listener, socket.socket() as caller:
        for each in (listener, caller):
            _goes_by(each, b"bbr")
            pacing.begin_near(each)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        caller.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            yield caller, accepted


def test_near_ones_go_by_cubic(pair: tuple[socket.socket, socket.socket]) -> None:
    for end in pair:
        pacing.go_on_by_distance(end)
        assert pacing.pace_of(end) == b"cubic"


def test_far_ones_go_by_what_the_system_has(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "NEAR_US", -1)
    for end in pair:
        pacing.go_on_by_distance(end)
        assert pacing.pace_of(end) == b"bbr"


def test_any_other_choice_of_the_system_stays() -> None:
    with socket.socket() as connection:
        _goes_by(connection, b"reno")
        pacing.begin_near(connection)
        assert pacing.pace_of(connection) == b"reno"
        pacing.go_on_by_distance(connection)
        assert pacing.pace_of(connection) == b"reno"


def test_sockets_of_the_launcher_use_the_chosen_congestion_control() -> None:
    with Machine().make_socket(socket.AF_INET) as made:
        assert pacing.pace_of(made) == {b"bbr": b"cubic"}.get(pacing.of_the_system(), pacing.of_the_system())
