"""DeepSpeed's native operations, compiled for the tests that load them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from autofit.training.prerequisites import native_ops


def compiled(*names: str) -> None:
    """Compile operations, each of which takes a minute if it is not compiled yet; skip the test if one cannot be.

    Done in a process of its own, because the process that compiles an operation also loads it.
    """
    for name in names:
        if name not in native_ops.operations():
            pytest.skip(f"this DeepSpeed has no {name}")
        hindrance = native_ops.hindrance(name)
        if hindrance is not None:
            pytest.skip(str(hindrance))
    for name in names:
        if not native_ops.is_built(name):
            build = f"from autofit.training.prerequisites import native_ops; native_ops.build({name!r})"
            subprocess.run([sys.executable, "-c", build], check=True)
