"""The instruction sets that a machine is taken to use are those that its libraries report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autofit.trial.machine import instructions as module
from autofit.trial.machine.detection import cpu
from autofit.trial.machine.instructions import are_capped, instructions

ZEN_3 = "flags : fpu sse4_1 avx fma avx2 vaes"
SAPPHIRE = f"{ZEN_3} avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_bf16"


@pytest.mark.parametrize(
    ("flags", "environment", "level"),
    [
        (ZEN_3, {}, "avx2"),
        (ZEN_3, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, "avx2"),
        (ZEN_3, {"ONEDNN_MAX_CPU_ISA": "sse41", "ATEN_CPU_CAPABILITY": "default"}, "sse41"),
        (SAPPHIRE, {}, "amx"),
        (SAPPHIRE, {"DNNL_MAX_CPU_ISA": "AVX512_CORE_BF16"}, "avx512-bf16"),
        (SAPPHIRE, {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}, "avx2"),
        (SAPPHIRE, {"ATEN_CPU_CAPABILITY": "avx2"}, "amx-aten-avx2"),
        (SAPPHIRE, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "avx2-aten-avx512"),
        ("Features : fp asimd sve asimddp i8mm bf16", {}, "asimd-sve-bf16"),
        ("Features : fp asimd", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "asimd"),
        ("isa : rv64imafdc", {}, None),
    ],
)
def test_the_level_is_that_of_the_flags_and_the_caps(
    flags: str, environment: dict[str, str], level: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor : 0\n{flags}\n")
    monkeypatch.setattr(module, "PROCESSORS", file)
    assert instructions(environment) == level


def test_a_capped_processor_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    if instructions() in (None, "sse41"):
        pytest.skip("nothing can be withheld from this processor")
    whole = cpu()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    capped = cpu()
    assert are_capped() and capped.name.endswith("c-sse41") and capped.key != whole.key


@pytest.mark.parametrize("cap", [None, "default", "avx2"])
def test_aten_uses_what_it_is_taken_to_use(cap: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    environment |= {} if cap is None else {"ATEN_CPU_CAPABILITY": cap}
    level = instructions({} if cap is None else {"ATEN_CPU_CAPABILITY": cap})
    if level is None:
        pytest.skip("not x86")
    ask = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    done = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    used = level.rpartition("-aten-")[2] if "-aten-" in level else module._dispatched(level)
    assert done.stdout.strip().lower() == used
