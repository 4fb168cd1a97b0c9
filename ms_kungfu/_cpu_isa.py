"""Detect and compare the vector instruction sets that oneDNN can use. This module uses no clock and no I/O.

oneDNN computes MindSpore's convolutions and matrix products on CPUs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import reduce

VARIABLE = "ONEDNN_MAX_CPU_ISA"
_FORMER = "DNNL_MAX_CPU_ISA"

# The levels of instruction sets in oneDNN 3. Each key is a value of dnnl_cpu_isa_t, and includes the bits of all levels
# that the level contains. The entry is the level's name in ONEDNN_MAX_CPU_ISA, and the /proc/cpuinfo flags that the
# level adds.
_LEVELS: dict[int, tuple[str, tuple[str, ...]]] = {
    0x1: ("SSE41", ("sse4_1",)),
    0x3: ("AVX", ("avx",)),
    0x7: ("AVX2", ("avx2",)),
    0xF: ("AVX2_VNNI", ("avx_vnni",)),
    0x1F: ("AVX2_VNNI_2", ("avx_vnni_int8", "avx_ne_convert")),
    0x27: ("AVX512_CORE", ("avx512f", "avx512bw", "avx512vl", "avx512dq")),
    0x67: ("AVX512_CORE_VNNI", ("avx512_vnni",)),
    0xE7: ("AVX512_CORE_BF16", ("avx512_bf16",)),
    0x1EF: ("AVX512_CORE_FP16", ("avx512_fp16",)),
    0xFEF: ("AVX512_CORE_AMX", ("amx_tile", "amx_int8", "amx_bf16")),
    0x1FEF: ("AVX512_CORE_AMX_FP16", ("amx_fp16",)),
}
CAPS = {mask: name for mask, (name, _) in _LEVELS.items()}
_MASKS = {name: mask for mask, name in CAPS.items()}


def native(cpuinfo: str) -> str:
    """Return the widest instruction-set level that a processor supports. `cpuinfo` is the text of /proc/cpuinfo.

    Return "" if the processor isn't x86-64 with SSE 4.1.
    """
    found = re.search(r"^flags\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = set(found[1].split()) if found else set()
    # The processor supports a level only if the processor also supports all levels that this level contains.
    has = {mask for mask, (_, added) in _LEVELS.items() if flags.issuperset(added)}
    return _widest(mask for mask in has if all(below in has for below in _LEVELS if below & mask == below))


def common(levels: Iterable[str]) -> str:
    """Return the widest level that all of `levels` contain; "" if `levels` is empty.

    >>> common(["AVX512_CORE_BF16", "AVX2_VNNI_2"])
    'AVX2'
    """
    masks = [_MASKS[level] for level in levels]
    if not masks:
        return ""
    shared = reduce(int.__and__, masks)
    return _widest(mask for mask in _LEVELS if mask & shared == mask)


def has_avx512(level: str) -> bool:
    return _MASKS.get(level, 0) & _MASKS["AVX512_CORE"] == _MASKS["AVX512_CORE"]


def level_named(name: str) -> str | None:
    """Return the level named `name`, ignoring case; None if there is none."""
    return name.upper() if name.upper() in _MASKS else None


def of_user(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the variable that limits oneDNN's instructions, and its value; ("", "") if no such variable is set."""
    if cap := environ.get(VARIABLE):
        return VARIABLE, cap
    if cap := environ.get(_FORMER):  # oneDNN reads this variable if ONEDNN_MAX_CPU_ISA is unset
        return _FORMER, cap
    return "", ""


def capped(environ: Mapping[str, str], cap: str | None) -> dict[str, str]:
    """Return a copy of `environ` that limits oneDNN's instructions to `cap`, or without a limit if `cap` is None."""
    others = {name: value for name, value in environ.items() if name not in (VARIABLE, _FORMER)}
    return {**others, **({} if cap is None else {VARIABLE: cap})}


def names() -> Collection[str]:
    return _MASKS


def _widest(masks: Iterable[int]) -> str:
    return CAPS.get(max(masks, default=0), "")
