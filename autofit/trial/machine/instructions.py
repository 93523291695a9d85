"""The instruction sets that torch's kernels really use here: what the processor has, capped by the environment.

Not counted: MKL, which multiplies fp32 matrices and which neither variable caps.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

PROCESSORS = Path("/proc/cpuinfo")
_LEVELS = {
    "sse41": "sse4_1",
    "avx": "avx",
    "avx2": "avx2 fma",
    "avx512": "avx512f avx512bw avx512vl avx512dq",
    "avx512-bf16": "avx512_bf16",
    "avx512-fp16": "avx512_fp16",
    "amx": "amx_tile amx_bf16",
    "amx-fp16": "amx_fp16",
}
"""Levels that change arithmetic on floats, each with what it adds to the flags of /proc/cpuinfo: those of oneDNN's
`dnnl_cpu_isa_t`, without the ones that add integer products alone (VNNI)."""
_ARM_FLAGS = ("asimd", "sve", "sve2", "bf16")
"""Flags of ARM that change arithmetic on floats (elf_hwcaps(7) of Linux for arm64)."""
_CAPS = {
    "SSE41": "sse41",
    "AVX": "avx",
    "AVX2": "avx2",
    "AVX2_VNNI": "avx2",
    "AVX2_VNNI_2": "avx2",
    "AVX512_CORE": "avx512",
    "AVX512_CORE_VNNI": "avx512",
    "AVX512_CORE_BF16": "avx512-bf16",
    "AVX512_CORE_FP16": "avx512-fp16",
    "AVX10_1_512": "avx512-fp16",
    "AVX512_CORE_AMX": "amx",
    "AVX10_1_512_AMX": "amx",
    "AVX512_CORE_AMX_FP16": "amx-fp16",
    "AVX10_1_512_AMX_FP16": "amx-fp16",
}
"""Values of ONEDNN_MAX_CPU_ISA (oneDNN developer guide, "CPU dispatcher control"); any other caps nothing."""
_ATEN = {"default": "avx", "avx2": "avx2", "avx512": "avx512"}
"""Values of ATEN_CPU_CAPABILITY, each with the highest level whose kernels are no better than it (ATen's DispatchStub);
any other caps nothing."""
_NAMES = tuple(_LEVELS)


def instructions(environment: Mapping[str, str] = os.environ) -> str | None:
    """The highest level that oneDNN uses, such as `avx512-bf16`; where ATen's own kernels are held to less than that
    implies, followed by their level, such as `avx512-bf16-aten-avx2`. Of an ARM processor, the `_ARM_FLAGS` that it
    has, which nothing caps, such as `asimd-sve-bf16`. None for any other."""
    facts = processor_facts()
    flags = set((facts.get("flags") or facts.get("Features") or "").split())  # as the line is called on x86, and on ARM
    had = list(itertools.takewhile(lambda level: flags.issuperset(_LEVELS[level].split()), _NAMES))
    if not had:
        return "-".join(name for name in _ARM_FLAGS if name in flags) or None
    highest = had[-1]
    cap = _CAPS.get((environment.get("ONEDNN_MAX_CPU_ISA") or environment.get("DNNL_MAX_CPU_ISA") or "").upper())
    capped = highest if cap is None else _lower(highest, cap)
    implied = _lower(highest, "avx512")
    aten = _lower(implied, _ATEN.get(environment.get("ATEN_CPU_CAPABILITY", ""), "avx512"))
    if _dispatched(aten) == _dispatched(capped):
        return capped
    return f"{capped}-aten-{_dispatched(aten)}"


def are_capped() -> bool:
    """Whether the environment withholds instruction sets that the processor has."""
    return instructions() != instructions({})


def processor_facts() -> dict[str, str]:
    """What the kernel says of the first processor; nothing where it says nothing."""
    facts: dict[str, str] = {}
    with suppress(OSError):
        for line in PROCESSORS.read_text().splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    return facts


def _lower(first: str, second: str) -> str:
    return min(first, second, key=_NAMES.index)


def _dispatched(level: str) -> str:
    """ATen's own word for the kernels that it picks at a level."""
    if _NAMES.index(level) < _NAMES.index("avx2"):
        return "default"
    return "avx2" if level == "avx2" else "avx512"
