"""Compilation of decoder layers by torch.compile."""

from __future__ import annotations

import os
import shutil
import sysconfig
from functools import cache
from pathlib import Path

from autofit.catalog.models import shape
from autofit.core.device.hardware import Hardware, compute_capability
from autofit.core.lattice import Axis, Config
from autofit.techniques.job import Job
from autofit.techniques.selective import keeps_results
from autofit.techniques.technique import Part, Technique

VARIANTS = 64
"""The most variants in which layers may be compiled: kinds of layers, times checkpointed or not, times lengths. Beyond
torch's own limit of 8 the others would run uncompiled, and only a warning would say so."""


class Compilation(Technique):
    """Fusion of elementwise operations within each decoder layer. All layers of a kind run the same code, so that one
    is compiled in place of all. Nothing outside the layers is compiled: there transformers would build a mask
    (find_packed_sequence_indices in masking_utils.py), with which torch has no flash kernel.

    Where a library gathers parameters in module hooks, these split a layer's graph: in ZeRO stage 3 into pieces, with
    no part of a checkpointed layer compiled. All of them train as they do without it; whether it pays off, a trial
    shows.
    """

    # No claim about memory: fused graphs keep fewer activations, but need workspace of their own.
    axis = Axis(
        name="compile",
        values=(False, True),
        recipe=False,
        does="Whether torch.compile compiles each decoder layer, once: 5 to 25 s on processors, not timed on a card.",
        meanings={False: "not compiled", True: "compiled; needs a compiler and Python's headers"},
        where="models whose layers transformers can checkpoint",
    )
    parts = frozenset({Part.DECODER, Part.EVALUATION})

    def unsupported(self, config: Config, job: Job) -> str | None:
        if config["compile"] is not True:
            return None
        if not shape(job.model).checkpointable:
            return f"compile=true cannot work: transformers does not mark the decoder layers of {job.model.name}"
        # DDP's optimizer overwrote a checkpoint's policy on what to keep when it split the graph, until
        # pytorch/pytorch#179496.
        if config["sharding"] == "ddp" and keeps_results(config) and job.stack.torch_release < (2, 13):
            return (
                f"compile=true cannot work with sharding=ddp and checkpointing={config['checkpointing']} before "
                "torch 2.13: DDP splits the graph to compile it, and the parts lose what is to be kept; use "
                "checkpointing=full"
            )
        return why_not_compiled("compile=true", job.hardware)


def why_not_compiled(setting: str, hardware: Hardware) -> str | None:
    """Why the kernels of `setting` cannot be compiled for the device, when they first run; None if they can. Triton
    makes inductor's and Liger's for accelerators, but none for the oldest of NVIDIA's cards (GPUTooOldForTriton in
    torch/_inductor/exc.py)."""
    capability = compute_capability(hardware.capability)
    if capability is not None and capability < 7.0:
        return f"{setting} cannot work on {hardware.name}: Triton's kernels need compute capability 7.0"
    missing = missing_tool(hardware.kind)
    return None if missing is None else f"{setting} needs {missing}, which is not installed here"


@cache
def missing_tool(kind: str) -> str | None:
    """What torch.compile or Triton lacks on this machine to build kernels for a device of `kind`; None if nothing.

    Inductor generates C++ for the CPU, Triton a launcher in C for accelerators; both include Python's headers.
    """
    variable, defaults = ("CXX", ("g++", "clang++")) if kind in ("cpu", "mps") else ("CC", ("gcc", "clang", "cc"))
    compiler = os.environ.get(variable)
    if not any(shutil.which(name) for name in ([compiler.split()[0]] if compiler and compiler.split() else defaults)):
        return f"a compiler ({compiler or defaults[0]})"
    if kind != "mps" and not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's headers (python3-dev)"
    return None
