"""DeepSpeed's native operations: which ones a config needs, whether they are compiled, and compiling them.

They are compiled once per machine and per version of torch and DeepSpeed, about a minute each. A trial never compiles
them, since that would count against its deadline. A trial also loads them without DeepSpeed's own loader, which takes
torch's lock on the operation's folder: a process killed while holding it leaves the lock behind, and every later one
waits forever.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from autofit.core.errors import EnvironmentLacks, lines_of
from autofit.core.lattice import Config
from autofit.techniques.axes.compilation import missing_tool
from autofit.techniques.axes.sharding import uses_deepspeed

BUILDERS = {"cpu_adam": "CPUAdamBuilder", "pin_memory": "PinMemoryBuilder", "async_io": "AsyncIOBuilder"}
"""DeepSpeed's builder class for each operation: Adam on the CPU, locked memory for file I/O, asynchronous file I/O."""
OF_EVERY_OFFLOAD = ("cpu_adam",)
"""The operations without which nothing can be offloaded; the others are for `offload=nvme` alone."""
COMMAND = "autofit doctor --build-ops"
PORTABLE = {"x86_64": ("-march=x86-64-v3", "-D__AVX256__"), "aarch64": ("-march=armv8-a", "-D__NEON__")}
"""By machine, what is compiled for in place of the processor that compiles: the compiler's target, and DeepSpeed's name
for its vectors (`simd_width`). x86-64-v3 is AVX2: Intel's since Haswell (2013), AMD's since Excavator (2015)."""
STAMP = "autofit-versions"
"""Name of the file next to a compiled operation that records the versions it was compiled against; with others it may
not load."""
LOCK = "lock"
"""Name of torch's lock file, in an operation's folder while `torch.utils.cpp_extension` compiles or loads it."""


def operations_of(config: Config) -> tuple[str, ...]:
    """The operations that training `config` uses."""
    if not uses_deepspeed(config) or config["offload"] == "none":
        return ()
    return operations() if config["offload"] == "nvme" else OF_EVERY_OFFLOAD


@cache
def operations() -> tuple[str, ...]:
    """The operations of `BUILDERS` that the installed DeepSpeed has: `pin_memory` was part of `async_io` before
    DeepSpeed's pull request 8236. It is not imported for this, which would take seconds."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return tuple(BUILDERS)
    builders = Path(spec.origin).parent / "ops" / "op_builder" / "cpu"
    return tuple(name for name in BUILDERS if (builders / f"{name}.py").exists())


def is_built(name: str) -> bool:
    """Whether the operation is compiled for the installed torch and DeepSpeed. Raises `EnvironmentLacks` if its folder
    can be neither found nor made."""
    with _in_its_folder(name):
        stamp = _folder(name) / STAMP
        return _library(name).exists() and stamp.exists() and stamp.read_text() == _versions()


def require(config: Config) -> None:
    """Raise `EnvironmentLacks`, with its remedy, if an operation that `config` needs is not or cannot be compiled."""
    for name in operations_of(config):
        reason = hindrance(name)
        if reason is not None:
            raise reason
        if not is_built(name):
            raise EnvironmentLacks(
                f"offload={config['offload']} needs DeepSpeed's {name}, which is not compiled here yet", remedy=COMMAND
            )


def load(name: str) -> None:
    """Load the compiled operation, so that DeepSpeed finds it. Raises `EnvironmentLacks` if it does not load."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    if name not in OpBuilder._loaded_ops:
        spec = importlib.util.spec_from_file_location(name, _library(name))
        assert spec is not None and spec.loader is not None
        try:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except ImportError as error:  # a library it was linked against is gone
            message = f"DeepSpeed's {name} is compiled, but does not load: {error}"
            raise EnvironmentLacks(message, remedy=f"rm -r {_folder(name)}; {COMMAND}") from error
        OpBuilder._loaded_ops[name] = module
    if name == "pin_memory":  # async_io calls its functions, and is not linked to it
        ctypes.CDLL(str(_library(name)), mode=ctypes.RTLD_GLOBAL)


def hindrance(name: str) -> EnvironmentLacks | None:
    """Why the operation cannot be compiled here, or cannot be loaded once it is; None if nothing is in the way."""
    try:
        built = is_built(name)
    except EnvironmentLacks as error:
        return error
    tool = None if built else missing_tool("cpu") or (None if shutil.which("ninja") else "ninja")
    if tool is not None:
        remedy = "pip install ninja" if tool == "ninja" else "apt-get install build-essential python3-dev"
        return EnvironmentLacks(f"DeepSpeed's {name} cannot be compiled without {tool}", remedy=remedy)
    # Debian and Ubuntu have libaio under the second name since their 64-bit time.
    libaio = ("libaio.so.1", "libaio.so.1t64")
    if name == "async_io" and not (_has_function(libaio, "io_pgetevents") if built else _has_libaio()):
        lacks = "is compiled, but cannot be loaded without libaio" if built else "needs libaio and its headers, version"
        return EnvironmentLacks(
            f"DeepSpeed's async_io {lacks} 0.3.112 or newer",
            remedy="apt-get install libaio-dev, or see docs/guides/offload.md where there is no such package",
        )
    return None


def _has_function(libraries: tuple[str, ...], function: str) -> bool:
    for library in libraries:
        with suppress(OSError):
            if hasattr(ctypes.CDLL(library), function):
                return True
    return False


@cache
def _has_libaio() -> bool:
    """Whether libaio can be compiled and linked against, found by trying. DeepSpeed calls `io_pgetevents`, which libaio
    has had since 0.3.112."""
    compiler = os.environ.get("CXX", "").split() or [shutil.which("g++") or "clang++"]
    attempt = subprocess.run(
        [*compiler, "-x", "c++", "-", "-shared", "-fPIC", "-o", os.devnull, "-laio"],
        input=b"#include <libaio.h>\nvoid *called = (void *)io_pgetevents;\n",
        capture_output=True,
    )
    return attempt.returncode == 0


def build(name: str, *, portable: bool = False) -> None:
    """Compile the operation unless it already is; takes about a minute. With `portable`, it is compiled again in any
    case, for the processors of `PORTABLE`. Raises `EnvironmentLacks` if that fails."""
    from filelock import FileLock  # released by the system if its holder is killed

    with _in_its_folder(name), FileLock(_folder(name) / "autofit-lock"):
        if portable or not is_built(name):
            _compile(name, portable)


def _compile(name: str, portable: bool) -> None:
    reason = hindrance(name)
    if reason is not None:
        raise reason
    if name == "async_io" and "pin_memory" in operations():  # torch loads what it has compiled
        build("pin_memory", portable=portable)
        load("pin_memory")
    remove_lock_of_the_dead(name)
    try:
        with redirect_stdout(sys.stderr):
            # Not `load`, which with async_io also loads pin_memory, and that by torch's lock.
            _builder(name, portable).jit_load(verbose=False)
    except Exception as error:  # whatever the compiler, linker or loader raises
        raise EnvironmentLacks(
            f"DeepSpeed's {name} could not be compiled: {_complaint(error)}", remedy="the message says what is missing"
        ) from error
    (_folder(name) / STAMP).write_text(_versions())


@contextmanager
def _in_its_folder(name: str) -> Iterator[None]:
    """Whatever the system refuses within becomes an `EnvironmentLacks`: torch makes the folder, by default in the home
    folder, when it is first asked for."""
    try:
        yield
    except OSError as error:
        raise EnvironmentLacks(
            f"the folder for DeepSpeed's compiled {name} cannot be used: {error}",
            remedy="export TORCH_EXTENSIONS_DIR=FOLDER, a folder that can be written to and has space",
        ) from error


def remove_lock_of_the_dead(name: str) -> None:
    """Remove torch's lock on the operation's folder if no process on this machine has it open: its holder was killed.

    torch keeps the file open while it holds the lock (`torch.utils.file_baton`), never removes a stale one, and waits
    until the file is gone.
    """
    lock = _folder(name) / LOCK
    if lock.exists() and not any(_is_open(lock, descriptors) for descriptors in Path("/proc").glob("[0-9]*/fd")):
        lock.unlink(missing_ok=True)


def _is_open(file: Path, descriptors: Path) -> bool:
    """Whether `file` is among a process's `descriptors`; False if the process has ended or may not be inspected."""
    try:
        return any(os.path.realpath(descriptor) == str(file.resolve()) for descriptor in descriptors.iterdir())
    except OSError:
        return False


def _complaint(error: Exception) -> str:
    """The compiler's first error if it reported one, else the last line: ninja's last line only counts errors."""
    lines = lines_of(error)
    return next((line for line in lines if ": error:" in line or "fatal error:" in line), lines[-1])[:300]


def _versions() -> str:
    import torch

    return f"torch {torch.__version__}, deepspeed {version('deepspeed')}"  # with torch's build, as +cpu


def _library(name: str) -> Path:
    return _folder(name) / f"{name}.so"


def _folder(name: str) -> Path:
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(name, verbose=False))


def _builder(name: str, portable: bool) -> Any:
    """DeepSpeed's builder for the operation on a CPU, whatever the device: no source needs CUDA, but its builder of
    `async_io` for NVIDIA GPUs asks for a CUDA toolkit."""
    from deepspeed.ops.op_builder import cpu

    builder = getattr(cpu, BUILDERS[name])()
    if portable:
        target, vectors = PORTABLE[platform.machine()]
        builder.cpu_arch, builder.simd_width = (lambda: target), (lambda: vectors)
    return builder
