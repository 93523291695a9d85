"""What offloading needs of the machine: compiled operations, and for nvme a folder. Each lack has its remedy."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from autofit.core.errors import EnvironmentLacks
from autofit.core.units import GIB
from autofit.operations.doctor import _operation
from autofit.techniques import unsupported
from autofit.techniques.axes import compilation
from autofit.techniques.axes.sharding import NVME_VARIABLE
from autofit.training.build import build
from autofit.training.prerequisites import native_ops, nvme
from autofit.training.prerequisites.requirements import why_not_trainable
from tests.compiled import compiled
from tests.tiny import CPU, CUDA_HARDWARE, STACK, config, job


@pytest.fixture
def nothing_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of one's own for what torch compiles, still empty; tools are looked for again."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr("deepspeed.ops.op_builder.builder.OpBuilder._loaded_ops", {})
    compilation.missing_tool.cache_clear()
    yield tmp_path
    compilation.missing_tool.cache_clear()


@pytest.mark.parametrize(
    ("values", "needed"),
    [
        ({}, ()),
        ({"sharding": "zero3"}, ()),
        ({"sharding": "fsdp", "offload": "params"}, ()),
        ({"offload": "optimizer"}, ("cpu_adam",)),
        ({"sharding": "zero3", "offload": "params"}, ("cpu_adam",)),
        ({"offload": "nvme"}, ("cpu_adam", "pin_memory", "async_io")),
    ],
)
def test_a_config_needs_what_it_calls(values: dict[str, str], needed: tuple[str, ...]) -> None:
    assert native_ops.operations_of(config(**values)) == needed


def test_an_older_deepspeed_has_fewer_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builders = tmp_path / "ops" / "op_builder" / "cpu"
    builders.mkdir(parents=True)
    for name in ("cpu_adam", "async_io"):
        (builders / f"{name}.py").touch()
    older = ModuleSpec("deepspeed", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: older)
    assert native_ops.operations.__wrapped__() == ("cpu_adam", "async_io")


def test_a_trial_does_not_compile_but_says_the_command(nothing_compiled: Path) -> None:
    with pytest.raises(EnvironmentLacks, match="not compiled here yet") as caught:
        build(config(offload="optimizer"), job(), CPU)
    assert caught.value.remedy == "autofit doctor --build-ops"
    assert not list(nothing_compiled.rglob("*.so"))


def test_a_search_leaves_out_what_this_machine_lacks(nothing_compiled: Path) -> None:
    here = job(stack=replace(STACK, deepspeed="0.19.8"))
    assert unsupported(config(offload="params"), here) is None
    assert "autofit doctor --build-ops" in (why_not_trainable(config(offload="params"), here) or "")
    assert "use adamw" in (why_not_trainable(config(offload="params", optimizer="sgd"), here) or "")
    assert why_not_trainable(config(), here) is None


def test_an_operation_is_of_the_torch_that_it_was_compiled_for(nothing_compiled: Path) -> None:
    folder = native_ops._folder("cpu_adam")
    (folder / "cpu_adam.so").write_text("")
    assert not native_ops.is_built("cpu_adam")
    (folder / native_ops.STAMP).write_text("torch 1.0, deepspeed 0.1")
    assert not native_ops.is_built("cpu_adam")
    (folder / native_ops.STAMP).write_text(f"torch {torch.__version__}, deepspeed {version('deepspeed')}")
    assert native_ops.is_built("cpu_adam")
    native_ops.require(config(offload="optimizer"))


def test_what_is_compiled_and_does_not_load_says_why(nothing_compiled: Path) -> None:
    (native_ops._folder("cpu_adam") / "cpu_adam.so").write_text("")
    with pytest.raises(EnvironmentLacks, match=r"cpu_adam is compiled, but does not load: .*cpu_adam\.so") as caught:
        native_ops.load("cpu_adam")
    assert caught.value.remedy == f"rm -r {nothing_compiled / 'cpu_adam'}; autofit doctor --build-ops"


@pytest.mark.parametrize(("has_libaio", "words"), [(True, None), (False, "cannot be loaded without libaio")])
def test_what_is_compiled_for_files_needs_libaio_and_nothing_that_compiles(
    nothing_compiled: Path, monkeypatch: pytest.MonkeyPatch, has_libaio: bool, words: str | None
) -> None:
    monkeypatch.setattr(native_ops, "_has_function", lambda libraries, function: has_libaio)
    for name in native_ops.operations():
        (native_ops._folder(name) / f"{name}.so").touch()
        (native_ops._folder(name) / native_ops.STAMP).write_text(native_ops._versions())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert native_ops.hindrance("cpu_adam") is None
    result = native_ops.hindrance("async_io")
    assert result is None if words is None else words in str(result)


def test_a_library_is_looked_for_under_each_name_and_for_its_function() -> None:
    assert native_ops._has_function(("libnothing.so.1", "libc.so.6"), "printf")
    assert native_ops._has_function(("libc.so.6", "libm.so.6"), "lgamma"), "an older library may lie beside a newer one"
    assert not native_ops._has_function(("libc.so.6",), "io_pgetevents")
    assert not native_ops._has_function(("libnothing.so.1",), "printf")


def test_a_folder_that_cannot_be_made_is_named_with_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()  # read-only folders are none to the superuser, who may run this
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    here = job(stack=replace(STACK, deepspeed="0.19.8"))
    message = why_not_trainable(config(offload="params"), here)
    assert message is not None and str(tmp_path / "file") in message and "export TORCH_EXTENSIONS_DIR" in message
    for build_it in (True, False):
        checks = [_operation(name, build_it) for name in native_ops.operations()]
        assert checks and all(str(tmp_path / "file") in check.found for check in checks)
        assert [check.state for check in checks].count("missing") == build_it


def test_a_folder_that_cannot_be_written_is_told_from_a_compiler_that_fails(
    nothing_compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (native_ops._folder("cpu_adam") / "autofit-lock").mkdir()
    with pytest.raises(EnvironmentLacks, match=r"cannot be used: .*autofit-lock") as caught:
        native_ops.build("cpu_adam")
    assert "TORCH_EXTENSIONS_DIR" in caught.value.remedy


HOLDS_THE_LOCK = """
import sys
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_the_lock_of_a_killed_process_holds_nobody_up(nothing_compiled: Path) -> None:
    lock = native_ops._folder("cpu_adam") / native_ops.LOCK
    native_ops.remove_lock_of_the_dead("cpu_adam")  # there is none
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_THE_LOCK, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        native_ops.remove_lock_of_the_dead("cpu_adam")
        assert lock.exists()
        holder.kill()
    assert lock.exists()
    native_ops.remove_lock_of_the_dead("cpu_adam")
    assert not lock.exists()


ADAM = """
weight = torch.nn.Parameter(torch.zeros(64))
weight.grad = torch.ones(64)
DeepSpeedCPUAdam([weight], lr=0.5).step()
assert (weight < -0.4).all(), weight
"""
FILES = """
handle = op_builder.AsyncIOBuilder().load().aio_handle(4096, 1, False, False, 1)
held = handle.new_cpu_locked_tensor(1024, torch.zeros(0)).fill_(2.0)
assert handle.sync_pwrite(held, "file", 0) == 1
assert torch.from_file("file", size=1024).sum() == 2048.0
"""


@pytest.mark.parametrize(
    ("names", "use"), [(("cpu_adam",), ADAM), (("pin_memory", "async_io"), FILES)], ids=["cpu_adam", "async_io"]
)
def test_a_lock_on_what_is_compiled_holds_no_trial_up(names: tuple[str, ...], use: str, tmp_path: Path) -> None:
    """DeepSpeed itself would wait for it. Its swappers load `pin_memory` with `async_io`."""
    compiled(*names)
    for name in names:
        shutil.copytree(native_ops._folder(name), tmp_path / name)
        (tmp_path / name / native_ops.LOCK).touch()
    program = f"""
import torch
from deepspeed.ops import op_builder
from deepspeed.ops.adam import DeepSpeedCPUAdam
from autofit.training.prerequisites import native_ops
for name in {names}:
    native_ops.load(name)
{use}"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path), "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


ON_NVIDIA_WITHOUT_TOOLKIT = """
import json
import torch
from torch.utils import cpp_extension
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from autofit.training.prerequisites import native_ops

assert get_accelerator().device_name() == "cuda"
cpp_extension.CUDA_HOME = None
torch.cuda.is_available = lambda: True
OpBuilder.has_function = lambda *asked: True
native_ops._has_libaio = lambda: True
native_ops.load = lambda name: None
given = {"here": {}, "anywhere": {}}
for where, asked_there in given.items():
    cpp_extension.load = lambda name, **asked: asked_there.update({name: asked})
    for name in native_ops.operations():
        native_ops.build(name, portable=where == "anywhere")
print(json.dumps(given))
"""


@pytest.fixture(scope="module")
def asked_of_the_compiler(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, Any]]]:
    """The arguments of each operation for this processor and for any, on a machine with an NVIDIA GPU and no
    toolkit."""
    folder = tmp_path_factory.mktemp("extensions")
    done = subprocess.run(
        [sys.executable, "-c", ON_NVIDIA_WITHOUT_TOOLKIT], capture_output=True, text=True,
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(folder), "DS_ACCELERATOR": "cuda"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_nothing_is_compiled_with_a_cuda_toolkit(asked_of_the_compiler: dict[str, Any]) -> None:
    """What would be compiled on a machine with an NVIDIA GPU and no toolkit: nothing of CUDA, each operation alone."""
    given = asked_of_the_compiler["here"]
    assert list(given) == list(native_ops.operations())
    for arguments in given.values():
        flags = [*arguments["extra_cflags"], *arguments["extra_include_paths"], *arguments["extra_ldflags"]]
        assert not arguments["with_cuda"] and not [flag for flag in flags if "cuda" in flag.lower()]


def test_what_is_portable_is_not_compiled_for_this_processor(asked_of_the_compiler: dict[str, Any]) -> None:
    here, anywhere = (asked_of_the_compiler[where]["cpu_adam"]["extra_cflags"] for where in ("here", "anywhere"))
    assert "-march=native" in here
    assert set(native_ops.PORTABLE[platform.machine()]) < set(anywhere) and "-march=native" not in anywhere


def test_without_a_compiler_there_is_nothing_to_build_with(
    nothing_compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    for attempt in (lambda: native_ops.build("cpu_adam"), lambda: native_ops.require(config(offload="params"))):
        with pytest.raises(EnvironmentLacks, match="cannot be compiled without a compiler") as caught:
            attempt()
        assert "build-essential" in caught.value.remedy


def test_what_the_compiler_says_is_told(nothing_compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(EnvironmentLacks, match="cpu_adam could not be compiled"):
        native_ops.build("cpu_adam")
    assert not native_ops.is_built("cpu_adam")


NVME = config(offload="nvme")


def test_a_folder_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NVME_VARIABLE, raising=False)
    with pytest.raises(EnvironmentLacks, match="none is set") as caught:
        nvme.require(NVME, job())
    assert NVME_VARIABLE in caught.value.remedy


def test_the_buffers_must_be_lockable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NVME_VARIABLE, str(tmp_path))
    needed = nvme.locked_bytes(NVME, job())
    for most in (None, needed):
        monkeypatch.setattr(nvme, "lockable_bytes", lambda most=most: most)
        assert nvme.require(NVME, job()) == tmp_path
    monkeypatch.setattr(nvme, "lockable_bytes", lambda: needed - 1)
    with pytest.raises(EnvironmentLacks, match="this process may lock") as caught:
        nvme.require(NVME, job())
    assert "ulimit -l" in caught.value.remedy


def test_the_limit_of_locked_memory_is_the_processs_unless_it_may_lock_all(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "from autofit.training.prerequisites import nvme; print(nvme.lockable_bytes())"
    held = [int(line.split()[1], 16) for line in Path("/proc/self/status").read_text().splitlines() if "CapEff" in line]
    run = subprocess.run(
        [sys.executable, "-c", f"import resource as r; r.setrlimit(r.RLIMIT_MEMLOCK, (4096, 4096)); {program}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout.strip() == ("None" if held[0] >> 14 & 1 else "4096")


def test_the_folder_must_be_there_and_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for name in ("absent", "file"):
        monkeypatch.setenv(NVME_VARIABLE, str(tmp_path / name))
        with pytest.raises(EnvironmentLacks, match=f"there is no folder {tmp_path / name}"):
            nvme.require(NVME, job())


def test_the_folder_must_be_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NVME_VARIABLE, "/proc/self")  # where nobody can write, root neither
    if not os.path.isdir("/proc/self"):
        pytest.skip("no such folder here")
    with pytest.raises(EnvironmentLacks, match="cannot be written"):
        nvme.require(NVME, job())


def test_the_folder_must_have_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NVME_VARIABLE, str(tmp_path))
    assert nvme.require(NVME, job()) == tmp_path
    usage = namedtuple("usage", ("total", "used", "free"))
    needed = nvme.needed_bytes(NVME, job())
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(needed, 1, needed - 1))
    with pytest.raises(EnvironmentLacks, match="free some space"):
        nvme.require(NVME, job())


def test_a_machine_needs_room_for_its_own_ranks_only() -> None:
    """A worker of a cluster sees one device; the machine's count is that of the ranks that Ray has put on it."""
    whole = nvme.needed_bytes(NVME, job())
    for count, share in ((1, 1 / 8), (2, 1 / 4), (8, 1)):
        many = job(devices=8, global_batch=8)
        many = replace(many, hardware=replace(CUDA_HARDWARE, count=count, host_memory_bytes=GIB))
        assert nvme.needed_bytes(NVME, many) == int(share * whole)
    assert nvme.needed_bytes(NVME, job(devices=8, global_batch=8)) == whole, "on a processor all are on one machine"


def test_what_killed_trials_have_left_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NVME_VARIABLE, str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    (tmp_path / f"{nvme.own_prefix()}{ended.pid}-left").mkdir()
    (tmp_path / f"{nvme.own_prefix()}{os.getpid()}-runs").mkdir()
    nvme.require(NVME, job())
    assert [path.name for path in tmp_path.iterdir()] == [f"{nvme.own_prefix()}{os.getpid()}-runs"]


def test_adapters_write_little_beside_the_frozen_weights() -> None:
    lora = nvme.needed_bytes(config(offload="nvme", method="lora", rank=8, precision="bf16-mixed"), job())
    assert 2 * 176_576 < lora < 18 * 176_576


def test_what_is_written_is_18_bytes_per_parameter_in_mixed_precision() -> None:
    per_parameter = {p: nvme.needed_bytes(config(offload="nvme", precision=p), job()) for p in ("bf16-mixed", "bf16")}
    assert per_parameter["bf16-mixed"] == 18 * 176_576
    assert per_parameter["bf16"] == 10 * 176_576
