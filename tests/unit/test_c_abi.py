"""The border that MindSpore's kernels cross: no exception does."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from ms_kungfu import _core
from ms_kungfu.errors import CollectiveTimeoutError


@pytest.fixture
def failing_join():
    def join() -> None:
        raise CollectiveTimeoutError("nobody has come")

    _core.set_join_handler(join)
    yield
    _core.set_join_handler(None)


def test_a_join_that_fails_is_a_status_and_a_text(failing_join):
    runtime = ctypes.CDLL(str(Path(_core.__file__).with_name("libkungfu_runtime.so")))
    runtime.kf_last_error.restype = ctypes.c_char_p
    timeout = 5  # KF_TIMEOUT
    size = ctypes.c_uint32(7)
    assert runtime.kf_cluster(None, ctypes.byref(size), None) == timeout
    assert runtime.kf_last_error() == b"CollectiveTimeoutError: nobody has come"
    assert size.value == 7
    assert runtime.kf_size() == 0
    assert runtime.kf_barrier(b"x") == timeout
    with pytest.raises(CollectiveTimeoutError, match="nobody has come"):
        _core.size()
    _core.set_join_handler(None)
    assert runtime.kf_cluster(None, ctypes.byref(size), None) == 0
    assert size.value == 1
    assert (runtime.kf_rank(), runtime.kf_size(), runtime.kf_cluster_version()) == (0, 1, 0)


@pytest.mark.parametrize("ends", [KeyboardInterrupt, SystemExit])
def test_interrupted_join_raises_the_exception_of_the_signal(ends: type[BaseException]) -> None:
    def join() -> None:
        raise ends("now")

    _core.set_join_handler(join)
    try:
        for call in (_core.size, lambda: _core.barrier("x"), lambda: _core.all_gather("x", b"a", bytearray(1))):
            with pytest.raises(ends, match="now"):
                call()
    finally:
        _core.set_join_handler(None)
    assert _core.size() == 1


def test_kernels_ask_for_the_cluster_by_kf_cluster_alone() -> None:
    # The others answer 0 where they fail, and a second one of them may know another cluster than the first.
    kernels = Path(__file__).resolve().parents[2] / "kernels"
    sources = [path for path in kernels.rglob("*") if path.suffix in (".cc", ".h")]
    assert sources
    calls = re.compile(r"\bkf_(rank|size|cluster_version)\(")
    assert [path.name for path in sources if calls.search(path.read_text())] == []
