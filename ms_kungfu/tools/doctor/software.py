"""Check Python, MindSpore, this package and other packages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ms_kungfu.launcher.devices import ASCEND, GPU
from ms_kungfu.tools.doctor.finding import Finding, missing, ok, wrong
from ms_kungfu.tools.doctor.system import LOAD_RUNTIME, System

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_KERNELS = {"CPU": "libkungfu_ms_cpu.so", "GPU": "libkungfu_ms_gpu.so", "Ascend": "libkungfu_ms_ascend.so"}
# This program loads the kernels, as the first operator in a user's program does.
_LOADING = "loading ms_kungfu's kernels"
_LOAD_KERNELS = f"""
doing("importing MindSpore")
import mindspore
doing({_LOADING!r})
found = {{"running": mindspore.__version__}}
try:
    mindspore.set_device("CPU")
    from ms_kungfu.ops import _plugin
    _plugin.load()
except Exception as error:
    found["error"] = str(error)
answer(found)
"""
_OF_DEVELOPERS = ("test", "lint", "docs", "release", "dev")


def check_python(system: System) -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    wanted = ",".join(system.own_metadata("Requires-Python"))
    if SpecifierSet(wanted).contains(system.python, prereleases=True):
        yield ok("Python", system.python)
    else:
        yield wrong(
            "Python",
            f"{system.python}, but ms_kungfu needs {wanted}",
            "create a virtual environment with another Python",
        )


def check_runtime(system: System) -> Iterator[Finding]:
    """Check ms_kungfu's compiled runtime, and that all files except the plugins are complete.

    `check_kernels` checks the plugins.
    """
    outcome, again = system.run(LOAD_RUNTIME), system.reinstall()
    damaged = [file for file in system.damaged() if not file.startswith("plugins/")]
    if outcome.error:
        yield wrong("ms_kungfu", f"its runtime can't be loaded from {system.package}: {outcome.error}", again)
    elif damaged:
        yield wrong(
            "ms_kungfu", f"some of its files are missing or truncated in {system.package}: {', '.join(damaged)}", again
        )
    else:
        yield ok("ms_kungfu", f"{system.version('ms-kungfu') or 'unknown version'} in {system.package}")


def check_mindspore(system: System) -> Iterator[Finding]:
    """Check MindSpore, and whether this package has kernels for the installed version of MindSpore."""
    wanted = next((r for r in _requirements(system) if r.name == "mindspore"), None)
    found = system.version("mindspore")
    built = _built_for(system, _KERNELS["CPU"])
    # A wheel has kernels for several versions of MindSpore, so the remedy may be another version of MindSpore instead
    # of another build of this package.
    again = system.reinstall()
    install = f'pip install "mindspore=={built[-1]}"' if built else f'pip install "{wanted}", then {again}'
    if found is None:
        what = "not installed: only the launcher, the config server and ms_kungfu.comm work without it"
        yield missing("MindSpore", what, install)
        return
    if wanted is not None and not _fits(wanted, found):
        yield wrong("MindSpore", f"{found}, but ms_kungfu needs {wanted.specifier}", install)
        return
    if not system.names(f"{system.package}/plugins"):
        why = "ms_kungfu was built without MindSpore and has no kernels"
        if system.is_of_a_wheel():
            why = "the kernels of ms_kungfu are missing: the installation is damaged"
        yield wrong("MindSpore", f"{found}, but {why}", again)
        return
    outcome = system.run(_LOAD_KERNELS, timeout_s=180.0)
    if outcome.error and outcome.during == _LOADING:
        yield wrong("MindSpore", f"{found} is installed, but {outcome.error}", again)
    elif outcome.error:
        # Without --no-deps, pip would also reinstall MindSpore's dependencies, and thereby change NumPy.
        remedy = f'pip install --no-deps --force-reinstall "mindspore=={found}"'
        yield wrong("MindSpore", f"{found} can't be imported: {outcome.error}", remedy)
    elif "error" in outcome.value:
        yield wrong("MindSpore", f"{outcome.value['running']}: {outcome.value['error']}", again)
    else:
        yield ok("MindSpore", f"{outcome.value['running']}, and the installed kernels are built for it")


def check_kernels(system: System) -> Iterator[Finding]:
    """Check for which devices this package has kernels that fit the installed version of MindSpore."""
    found, damaged = system.version("mindspore"), system.damaged()
    for device, name in _KERNELS.items():
        kind = {"GPU": GPU, "Ascend": ASCEND}.get(device)
        file = f"plugins/{found}/{name}"
        if file in damaged:
            yield wrong(
                f"{device} kernels", f"{file} is missing or truncated: the installation is damaged", system.reinstall()
            )
        elif system.is_file(f"{system.package}/{file}"):
            yield ok(f"{device} kernels", file)
        else:
            needed = kind is not None and kind.count(system.names("/dev"))
            how = "install a wheel of ms_kungfu that has them" if system.is_of_a_wheel() else system.reinstall()
            remedy = f'device_target="{device}" needs them: {how}' if needed else ""
            others = ", ".join(_built_for(system, name))
            yield missing(f"{device} kernels", f"built for MindSpore {others} only" if others else "not built", remedy)


def _built_for(system: System, kernels: str) -> list[str]:
    """Return the MindSpore versions for which this package has these kernels, with the oldest version first."""
    from packaging.version import Version

    folder = f"{system.package}/plugins"
    return sorted((name for name in system.names(folder) if system.is_file(f"{folder}/{name}/{kernels}")), key=Version)


def check_required(system: System) -> Iterator[Finding]:
    """Check the packages that ms_kungfu requires, except MindSpore."""
    for requirement in _requirements(system):
        if requirement.name != "mindspore":
            found = system.version(requirement.name)
            remedy = f'pip install "{requirement}"'
            topic = {"numpy": "NumPy"}.get(requirement.name, requirement.name)
            if found is None:
                yield wrong(topic, "not installed", remedy)
            elif not _fits(requirement, found):
                reason = ", with which MindSpore's first operator fails" if requirement.name == "numpy" else ""
                yield wrong(topic, f"{found}, but ms_kungfu needs {requirement.specifier}{reason}", remedy)
            else:
                yield ok(topic, found)


def check_extras(system: System) -> Iterator[Finding]:
    """Check the requirements of each extra, except extras for developing this package."""
    always = {str(requirement) for requirement in _requirements(system)}
    for extra in system.own_metadata("Provides-Extra"):
        if extra in _OF_DEVELOPERS:
            continue
        requirements = [r for r in _requirements(system, extra) if str(r) not in always]
        # An extra that only combines other extras isn't shown.
        if any(r.name in ("ms-kungfu", "ms_kungfu") for r in requirements):
            continue
        topic = f"extra {extra}"
        found = [(r, system.version(r.name)) for r in requirements]
        lacking = [(r, version) for r, version in found if not _fits(r, version)]
        if lacking:
            told = [f"no {r.name}" if v is None else f"{r.name} {v} instead of {r.specifier}" for r, v in lacking]
            words = " ".join(f'"{r.name}{r.specifier}"' for r, _ in lacking)
            yield missing(topic, ", ".join(told), f"pip install {words}")
        else:
            yield ok(topic, ", ".join(f"{r.name} {version}" for r, version in found))


def _requirements(system: System, extra: str = "") -> list[Requirement]:
    """Return the requirements of ms_kungfu on this machine and Python, with the extra `extra` ("" for no extra)."""
    from packaging.requirements import Requirement

    each = map(Requirement, system.own_metadata("Requires-Dist"))
    return [r for r in each if r.marker is None or r.marker.evaluate({"extra": extra})]


def _fits(requirement: Requirement, version: str | None) -> bool:
    return version is not None and requirement.specifier.contains(version, prereleases=True)
