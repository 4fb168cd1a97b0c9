"""Which vector instructions a job's workers use: what a host reports, how it measures, and what the job makes of it."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest

from ms_kungfu import _cpu_isa, _files
from ms_kungfu.launcher import cpu_isa
from ms_kungfu.launcher.cpu_isa import NotMeasuredError, Times, of_host, other_instructions, settle
from ms_kungfu.launcher.wire.messages import CpuIsa

AVX2 = "sse4_1 avx avx2"
AVX512 = f"{AVX2} avx512f avx512bw avx512vl avx512dq"
SLOW, FAST = Times(446.0, 8.0), Times(4.0, 8.0)


def cpuinfo(flags: str) -> str:
    return f"processor\t: 0\nmodel name\t: A CPU\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: {flags}\n"


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (AVX2, "AVX2"),
        (f"{AVX2} avx_vnni", "AVX2_VNNI"),
        (f"{AVX2} avx512f avx512dq", "AVX2"),  # AVX-512 without what oneDNN needs
        (AVX512, "AVX512_CORE"),
        (f"{AVX512} avx512_vnni avx512_bf16", "AVX512_CORE_BF16"),
        (f"{AVX512} avx512_bf16", "AVX512_CORE"),  # a level needs those below it
        ("fp asimd", ""),
    ],
)
def test_native_level_is_the_widest_of_the_flags(flags: str, level: str) -> None:
    assert _cpu_isa.native(cpuinfo(flags)) == level
    assert _cpu_isa.native("") == ""


@pytest.mark.parametrize(
    ("levels", "level"),
    [
        ([], ""),
        (["AVX2"], "AVX2"),
        (["AVX512_CORE_BF16", "AVX512_CORE"], "AVX512_CORE"),
        (["AVX512_CORE", "AVX2_VNNI_2"], "AVX2"),
        (["AVX512_CORE_FP16", "AVX2_VNNI_2"], "AVX2_VNNI"),
    ],
)
def test_common_level_is_included_in_all(levels: list[str], level: str) -> None:
    assert _cpu_isa.common(levels) == level


# ---- a host ----


def host(times: Times | None, wanted: str = "auto", flags: str = AVX512, **environ: str) -> CpuIsa | None:
    """Its report; `times` None: it must not measure."""

    def measure(_: str) -> Times:
        assert times is not None
        return times

    return of_host(wanted, environ, cpuinfo(flags), measure)


def test_host_with_slow_avx512_reports_avx2_and_the_times() -> None:
    said = "a convolution takes 446.0 ms, with AVX2 at most 8.0 ms"
    assert host(SLOW) == CpuIsa("AVX2", "AVX512_CORE", said)
    assert host(FAST) == CpuIsa("AVX512_CORE", "AVX512_CORE")
    assert host(Times(24.0, 8.0)) == CpuIsa("AVX512_CORE", "AVX512_CORE")


def test_host_measures_only_for_auto_and_avx512() -> None:
    assert host(None, flags=AVX2) == CpuIsa("AVX2", "AVX2")
    assert host(None, "native") == CpuIsa("AVX512_CORE", "AVX512_CORE")
    assert host(None, "AVX") == CpuIsa("AVX", "AVX512_CORE", "-cpu-isa avx")
    assert host(None, "AVX512_CORE", flags=AVX2) == CpuIsa("AVX2", "AVX2", "-cpu-isa avx512_core")
    assert host(None, flags="fp asimd") is None


@pytest.mark.parametrize("wanted", ["auto", "native", "AVX512_CORE"])
def test_users_variable_takes_precedence(wanted: str) -> None:
    one, other = "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"
    assert host(None, wanted, **{one: "avx"}) == CpuIsa("AVX", "AVX512_CORE", one, is_users=True)
    assert host(None, wanted, **{other: "AVX"}) == CpuIsa("AVX", "AVX512_CORE", other, is_users=True)
    assert host(None, wanted, **{one: "AVX2", other: "AVX"}) == CpuIsa("AVX2", "AVX512_CORE", one, is_users=True)
    assert host(None, wanted, **{one: "DEFAULT"}) == CpuIsa("AVX512_CORE", "AVX512_CORE", one, is_users=True)


def test_host_that_can_not_measure_reports_native_and_why() -> None:
    def measure(_: str) -> Times:
        raise NotMeasuredError("no time")

    assert of_host("auto", {}, cpuinfo(AVX512), measure) == CpuIsa("AVX512_CORE", "AVX512_CORE", error="no time")


# ---- the job ----

NATIVE = CpuIsa("AVX512_CORE", "AVX512_CORE")
CAPPED = CpuIsa("AVX2", "AVX512_CORE", "it is slow")
USERS = CpuIsa("AVX", "AVX512_CORE", "ONEDNN_MAX_CPU_ISA", is_users=True)


@pytest.mark.parametrize(
    ("hosts", "cap", "line"),
    [
        ({"a": NATIVE, "b": NATIVE}, None, ""),
        ({"a": None, "b": None}, None, ""),
        ({"a": NATIVE, "b": CAPPED}, "AVX2", 'cpu isa: cap=AVX2 host=b reason="it is slow"'),
        (
            {"a": NATIVE, "b": CpuIsa("AVX2", "AVX2")},
            "AVX2",
            'cpu isa: cap=AVX2 host=b reason="the processors of the hosts differ"',
        ),
        ({"a": USERS, "b": USERS}, "AVX", ""),
        ({"a": NATIVE, "b": USERS}, "AVX", 'cpu isa: cap=AVX host=b reason="ONEDNN_MAX_CPU_ISA"'),
        (
            {"a": NATIVE, "b": CpuIsa("AVX512_CORE", "AVX512_CORE", error="no time")},
            None,
            'cpu isa: cap=native host=b error="no time"',
        ),
    ],
)
def test_workers_of_all_hosts_get_one_cap(hosts, cap, line, caplog) -> None:
    caplog.set_level(logging.INFO, "ms_kungfu")
    assert settle(hosts) == cap
    assert [record.getMessage() for record in caplog.records] == [line] * bool(line)


def test_joining_host_without_the_jobs_instructions_is_named() -> None:
    narrow = CpuIsa("AVX", "AVX")
    assert "n supports at most AVX, but the job's workers use AVX2" in other_instructions("n", narrow, "AVX2", NATIVE)
    assert "workers use AVX512_CORE" in other_instructions("n", narrow, None, NATIVE)
    assert other_instructions("n", NATIVE, "AVX2", NATIVE) == ""
    assert other_instructions("n", NATIVE, None, NATIVE) == ""
    assert other_instructions("n", None, None, None) == ""


# ---- the measurement ----


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The caps with which a convolution was measured, in `tmp_path`'s cache, with a library that isn't one."""
    library = tmp_path / "libdnnl.so.3"
    library.write_text("3")
    found: list[str | None] = []

    def run(_, cap):
        found.append(cap)
        return 8.0 if cap else 446.0

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_isa, "find_library", lambda: library)
    monkeypatch.setattr(cpu_isa, "_run", run)
    return found


def files(folder):
    return sorted((folder / "cache" / "ms_kungfu").glob("*.json"))


def test_measurement_is_kept_for_processor_and_mindspore(runs, tmp_path) -> None:
    for _ in range(2):
        assert cpu_isa.measured(cpuinfo(AVX512)) == SLOW
    assert runs == [None, "AVX2"]
    cpu_isa.measured(cpuinfo(f"{AVX512} avx512_vnni"))
    assert len(runs) == 4
    (tmp_path / "libdnnl.so.3").write_text("another MindSpore's")
    cpu_isa.measured(cpuinfo(AVX512))
    assert len(runs) == 6
    assert len(files(tmp_path)) == 3


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"wide": "x", "narrow": 1}', '{"wide": 1}'])
def test_damaged_cache_is_measured_again(text, runs, tmp_path) -> None:
    cpu_isa.measured(cpuinfo(AVX512))
    (file,) = files(tmp_path)
    file.write_text(text)
    assert cpu_isa.measured(cpuinfo(AVX512)) == SLOW
    assert len(runs) == 4


def test_without_a_cache_each_job_measures(runs, tmp_path) -> None:
    (tmp_path / "cache").write_text("no folder")
    for _ in range(2):
        assert cpu_isa.measured(cpuinfo(AVX512)) == SLOW
    assert len(runs) == 4


def test_failed_measurement_is_kept_for_a_day(runs, tmp_path, monkeypatch) -> None:
    def fail(*_):
        runs.append("failed")
        raise NotMeasuredError("it crashed")

    monkeypatch.setattr(cpu_isa, "_run", fail)
    for _ in range(2):
        with pytest.raises(NotMeasuredError, match="it crashed"):
            cpu_isa.measured(cpuinfo(AVX512))
    assert runs == ["failed"]
    (file,) = files(tmp_path)
    os.utime(file, (time.time() - 86500,) * 2)
    with pytest.raises(NotMeasuredError, match="it crashed"):
        cpu_isa.measured(cpuinfo(AVX512))
    assert runs == ["failed"] * 2


def test_without_mindspore_nothing_is_slow(runs, monkeypatch) -> None:
    monkeypatch.setattr(cpu_isa, "find_library", lambda: None)
    assert not cpu_isa.measured(cpuinfo(AVX512)).is_much_slower
    assert runs == []


def test_launchers_at_one_moment_measure_once(runs, monkeypatch) -> None:
    begun, may_end, waits = (threading.Event() for _ in range(3))
    run = cpu_isa._run

    def slow(*arguments):
        begun.set()
        assert may_end.wait(20)
        return run(*arguments)

    def sleep(_):
        waits.set()
        time.sleep(0.001)

    monkeypatch.setattr(cpu_isa, "_run", slow)
    monkeypatch.setattr(_files, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    found: list[Times] = []
    threads = [threading.Thread(target=lambda: found.append(cpu_isa.measured(cpuinfo(AVX512)))) for _ in range(2)]
    threads[0].start()
    assert begun.wait(20)
    threads[1].start()
    assert waits.wait(20)  # for the lock
    may_end.set()
    for thread in threads:
        thread.join(20)
    assert found == [SLOW, SLOW]
    assert runs == [None, "AVX2"]


def test_process_that_stands_still_with_the_lock_holds_no_job_up(runs, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cpu_isa, "_LOCK_S", 0.05)
    (tmp_path / "cache" / "ms_kungfu").mkdir(parents=True)
    with cpu_isa._one_at_a_time(tmp_path / "cache" / "ms_kungfu" / "convolution.lock"):
        assert cpu_isa.measured(cpuinfo(AVX512)) == SLOW
    assert runs == [None, "AVX2"]


def test_library_that_is_none_is_not_measured(tmp_path) -> None:
    (tmp_path / "libdnnl.so.3").write_text("no library")
    with pytest.raises(NotMeasuredError, match=r"could not be measured: OSError: .*libdnnl\.so\.3"):
        cpu_isa._run(tmp_path / "libdnnl.so.3", None)


def test_convolution_that_takes_too_long_is_not_measured(monkeypatch) -> None:
    def never(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", never)
    with pytest.raises(NotMeasuredError, match="a convolution took more than 5 s"):
        cpu_isa._run("libdnnl.so.3", None)


def test_convolution_of_mindspores_onednn_is_measured() -> None:
    library = cpu_isa.find_library()
    if library is None:
        pytest.skip("MindSpore is not installed")
    assert 0 < cpu_isa._run(library, "SSE41") < 5000
