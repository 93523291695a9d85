"""DeepSpeed's native operations: which a config needs, whether they are compiled, and compiling them.

They are compiled once per machine and version of torch and DeepSpeed, which takes a minute each. A trial never does it:
the time would be taken from its deadline. It also loads them without DeepSpeed, which takes torch's lock on an
operation's folder for that: whoever is killed meanwhile leaves the lock behind, and everyone after waits without end.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from autofit.errors import EnvironmentLacks
from autofit.lattice import Config
from autofit.techniques.compilation import missing_tool
from autofit.techniques.sharding import uses_deepspeed

BUILDERS = {"cpu_adam": "CPUAdamBuilder", "async_io": "AsyncIOBuilder"}
"""DeepSpeed's classes by the name of the operation: Adam on a processor, asynchronous files."""
COMMAND = "autofit doctor --build-ops"
STAMP = "autofit-versions"
"""Beside a compiled operation: what it was compiled against, without which it may not load."""
LOCK = "lock"
"""torch's, in the folder of an operation, while `torch.utils.cpp_extension` compiles or loads it."""


def needed(config: Config) -> tuple[str, ...]:
    """The operations that training `config` calls."""
    if not uses_deepspeed(config) or config["offload"] == "none":
        return ()
    return ("cpu_adam", "async_io") if config["offload"] == "nvme" else ("cpu_adam",)


def is_built(name: str) -> bool:
    """Whether the operation is compiled for the installed torch and DeepSpeed."""
    folder = _folder(name)
    stamp = folder / STAMP
    return _library(name).exists() and stamp.exists() and stamp.read_text() == _versions()


def require(config: Config) -> None:
    """Raise `EnvironmentLacks`, with the command, for what `config` needs and is not compiled yet, or cannot be."""
    for name in needed(config):
        if not is_built(name):
            raise obstacle(name) or EnvironmentLacks(
                f"offload={config['offload']} needs DeepSpeed's {name}, which is not compiled here yet", remedy=COMMAND
            )


def load(config: Config) -> None:
    """Load the operations that `config` calls, all of them compiled, so that DeepSpeed finds them. Raises
    `EnvironmentLacks` for one that does not load."""
    for name in needed(config):
        load_operation(name)


def load_operation(name: str) -> None:
    """Load the compiled operation for DeepSpeed, unless it is loaded. Raises `EnvironmentLacks` if it does not load."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    if name in OpBuilder._loaded_ops:
        return
    spec = importlib.util.spec_from_file_location(name, _library(name))
    assert spec is not None and spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:  # a library that it was linked to is gone
        raise EnvironmentLacks(f"DeepSpeed's {name} is compiled, but does not load: {error}", remedy=COMMAND) from error
    OpBuilder._loaded_ops[name] = module


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
    from filelock import FileLock  # which the system gives back, whoever is killed

    with FileLock(_folder(name) / "autofit-lock"):
        if is_built(name):
            return
        hindrance = obstacle(name)
        if hindrance is not None:
            raise hindrance
        remove_lock_of_the_dead(name)
        try:
            with redirect_stdout(sys.stderr):
                _builder(name).load(verbose=False)
        except Exception as error:  # whatever the compiler, the linker or the loader says
            raise EnvironmentLacks(
                f"DeepSpeed's {name} could not be compiled: {_complaint(error)}",
                remedy="the message says what is missing",
            ) from error
        (_folder(name) / STAMP).write_text(_versions())


def remove_lock_of_the_dead(name: str) -> None:
    """Remove torch's lock on the operation's folder if no process of this machine has it open: who took it was killed.

    torch never does (`torch.utils.file_baton`: it waits until the file is gone), and keeps it open while it holds it.
    """
    lock = _folder(name) / LOCK
    if lock.exists() and not any(_is_open(lock, descriptors) for descriptors in Path("/proc").glob("[0-9]*/fd")):
        lock.unlink(missing_ok=True)


def _is_open(file: Path, descriptors: Path) -> bool:
    """Whether one of a process's `descriptors` is `file`; False where it has ended, or is not ours to look at."""
    try:
        return any(os.path.realpath(descriptor) == str(file.resolve()) for descriptor in descriptors.iterdir())
    except OSError:
        return False


def _complaint(error: Exception) -> str:
    """The compiler's first error where it has said one: ninja's own last line only counts them."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line for line in lines if ": error:" in line or "fatal error:" in line), lines[-1])[:300]


def _versions() -> str:
    return f"torch {version('torch')}, deepspeed {version('deepspeed')}"


def _library(name: str) -> Path:
    return _folder(name) / f"{name}.so"


def _folder(name: str) -> Path:
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(name, verbose=False))


def _builder(name: str) -> Any:
    from deepspeed.ops import op_builder

    return getattr(op_builder, BUILDERS[name])()
