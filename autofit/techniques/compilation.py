"""Compilation of the decoder by torch.compile."""

from __future__ import annotations

import os
import shutil
import sysconfig
from functools import cache
from pathlib import Path

from autofit.lattice import Axis, Config
from autofit.techniques.job import Job
from autofit.techniques.technique import Plan, Technique


class Compilation(Technique):
    """Fusion of elementwise operations. Setting it up takes minutes: a trial counts that beside the speed."""

    # No claim on memory: fused graphs keep fewer activations, and need workspace of their own.
    axis = Axis(name="compile", values=(False, True), recipe=False)

    def unsupported(self, config: Config, job: Job) -> str | None:
        if config["compile"] is not True:
            return None
        missing = missing_tool(job.hardware.kind)
        return None if missing is None else f"compile=true needs {missing}, which is not installed here"

    def plan(self, config: Config, job: Job, plan: Plan) -> None:
        plan.compile = config["compile"] is True


@cache
def missing_tool(kind: str) -> str | None:
    """What torch.compile lacks on this machine to build kernels for a device of `kind`; None if nothing.

    Inductor writes C++ for the CPU, Triton a launcher in C for accelerators; both include Python's headers.
    """
    variable, usual = ("CXX", ("g++", "clang++")) if kind in ("cpu", "mps") else ("CC", ("gcc", "clang", "cc"))
    named = os.environ.get(variable)
    if not any(shutil.which(name) for name in ([named.split()[0]] if named and named.split() else usual)):
        return f"a compiler ({named or usual[0]})"
    if kind != "mps" and not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's headers (python3-dev)"
    return None
