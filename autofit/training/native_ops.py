"""DeepSpeed's native operations: which a config needs, whether they are compiled, and compiling them.

They are compiled once per machine and version of torch, which takes a minute each. A trial never does it: the time
would be taken from its deadline.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

from autofit.errors import EnvironmentLacks
from autofit.lattice import Config
from autofit.techniques.compilation import missing_tool
from autofit.techniques.sharding import uses_deepspeed

BUILDERS = {"cpu_adam": "CPUAdamBuilder", "async_io": "AsyncIOBuilder"}
"""DeepSpeed's classes by the name of the operation: Adam on a processor, asynchronous files."""
COMMAND = "autofit doctor --build-ops"
STAMP = "autofit-torch-version"
"""Beside a compiled operation: the version of torch that it was compiled against, without which it may not load."""


def needed(config: Config) -> tuple[str, ...]:
    """The operations that training `config` calls."""
    if not uses_deepspeed(config) or config["offload"] == "none":
        return ()
    return ("cpu_adam", "async_io") if config["offload"] == "nvme" else ("cpu_adam",)


def is_built(name: str) -> bool:
    """Whether the operation is compiled for the installed torch."""
    import torch

    folder = _folder(name)
    stamp = folder / STAMP
    return (folder / f"{name}.so").exists() and stamp.exists() and stamp.read_text() == torch.__version__


def require(config: Config) -> None:
    """Raise `EnvironmentLacks`, with the command, for what `config` needs and is not compiled yet, or cannot be."""
    for name in needed(config):
        hindrance = obstacle(name)  # DeepSpeed looks for compiler and libraries whenever it loads what they have made
        if hindrance is not None:
            raise hindrance
        if not is_built(name):
            raise EnvironmentLacks(
                f"offload={config['offload']} needs DeepSpeed's {name}, which is not compiled here yet", remedy=COMMAND
            )


def obstacle(name: str) -> EnvironmentLacks | None:
    """Why the operation cannot be compiled here; None where nothing is in the way."""
    tool = missing_tool("cpu") or (None if shutil.which("ninja") else "ninja")
    if tool is not None:
        remedy = "pip install ninja" if tool == "ninja" else "apt-get install build-essential python3-dev"
        return EnvironmentLacks(f"DeepSpeed's {name} cannot be compiled without {tool}", remedy=remedy)
    if name == "async_io" and not _has_libaio():
        return EnvironmentLacks(
            "DeepSpeed's async_io cannot be used without libaio 0.3.112 or newer and its headers",
            remedy="apt-get install libaio-dev, or see README.md where there is no such package",
        )
    return None


@cache
def _has_libaio() -> bool:
    """Whether a program can be compiled and linked against it, which is tried. DeepSpeed calls `io_pgetevents`, which
    libaio has since 0.3.112."""
    compiler = os.environ.get("CXX", "").split() or [shutil.which("g++") or "clang++"]
    tried = subprocess.run(
        [*compiler, "-x", "c++", "-", "-shared", "-fPIC", "-o", os.devnull, "-laio"],
        input=b"#include <libaio.h>\nvoid *called = (void *)io_pgetevents;\n",
        capture_output=True,
    )
    return tried.returncode == 0


def build(name: str) -> None:
    """Compile the operation, unless it is; takes a minute. Raises `EnvironmentLacks` if it cannot be."""
    import torch

    if is_built(name):
        return
    hindrance = obstacle(name)
    if hindrance is not None:
        raise hindrance
    try:
        with redirect_stdout(sys.stderr):
            _builder(name).load(verbose=False)
    except Exception as error:  # whatever the compiler, the linker or the loader says
        raise EnvironmentLacks(
            f"DeepSpeed's {name} could not be compiled: {_complaint(error)}", remedy="the message says what is missing"
        ) from error
    (_folder(name) / STAMP).write_text(torch.__version__)


def _complaint(error: Exception) -> str:
    """The compiler's first error where it has said one: ninja's own last line only counts them."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line for line in lines if ": error:" in line or "fatal error:" in line), lines[-1])[:300]


def _folder(name: str) -> Path:
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(name, verbose=False))


def _builder(name: str) -> Any:
    from deepspeed.ops import op_builder

    return getattr(op_builder, BUILDERS[name])()
