"""Commands with two ranks that meet what they must not: a typed outcome or one line, and a search goes on.

The ranks are real processes; what one of them is to do is the name of the model.
"""

from __future__ import annotations

import shutil
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import model_in
from kept import Kept
from patience import within
from unit.cli.conftest import Autofit
from unit.cli.test_bad_input import check

from autofit.operations import doctor, single_trial
from autofit.search import loop
from autofit.store import Store
from autofit.techniques.axes import compilation
from autofit.techniques.axes.sharding import NVME_VARIABLE
from autofit.training.prerequisites import native_ops
from autofit.trial.machine.cores import cores
from autofit.trial.process.group_runner import GroupRunner
from autofit.trial.request import TrialRequest
from autofit.workers import in_place

Lack = Callable[[Path, pytest.MonkeyPatch], str]
"""Takes something from the folder, and says what the program will."""
TINY = ("--model", "./tiny", "--seq-len", "32", "--global-batch", "4", "--device", "cpu")
ON_TWO = (*TINY, "--devices", "2")
HURRIED_SECONDS = 2.0
"""A deadline at which a trial has not ended, however far it has come."""


def hurried(request: TrialRequest) -> TrialRequest:
    """With a deadline of seconds where a search would wait for ten minutes."""
    hangs = request.job.model.name == "fsdp_fails" and request.config["sharding"] == "fsdp"
    return replace(request, deadline_seconds=HURRIED_SECONDS) if hangs else request


@pytest.fixture(scope="module")
def kept(pair: GroupRunner) -> Kept:
    return Kept(pair, ranks=2, changed=hurried)


@pytest.fixture
def on_two(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which trials of two ranks may run, at once."""
    if cores() < 2:
        pytest.skip("each rank takes a core")
    for module in (single_trial, in_place):
        monkeypatch.setattr(module, "GroupRunner", kept)
    for name in ("TIMING_SECONDS", "VERIFICATION_SECONDS"):
        monkeypatch.setattr(loop, name, 0.2)


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path) -> None:
    for name in ("tiny", "rank_1_dies", "rank_1_hangs", "fsdp_fails"):
        model_in(tmp_path / name)


def space(folder: Path, **axes: str) -> str:
    """The file of a search space."""
    path = folder / "own.yaml"
    path.write_text("axes:\n" + "".join(f"  {name}: [{values}]\n" for name, values in axes.items()))
    return str(path)


@pytest.mark.parametrize("command", ["trial", "search", "in place", "dry run"])
def test_more_ranks_than_devices(autofit: Autofit, command: str) -> None:
    arguments = {
        "trial": ("trial", "--config", "sharding=ddp"),
        "search": ("search",),
        "in place": ("search", "--in-place"),
        "dry run": ("search", "--dry-run"),
    }[command]
    many = 2 * cores()
    done = autofit(*arguments, *TINY[:4], "--global-batch", str(many), "--device", "cpu", "--devices", str(many))
    check(done, 4, f"--devices {many} asks for {many} ranks", f"has {cores()} cores", f"use --devices {cores()}, or")


def test_a_rank_that_dies_in_a_collective(autofit: Autofit, on_two: None, store_file: Path) -> None:
    done = autofit("trial", "--model", "./rank_1_dies", *ON_TWO[2:], "--config", "sharding=ddp", "--json")
    assert (done.code, done.err) == (4, "")
    assert (done.document["outcome"], done.document["signal"]) == ("crashed", "SIGKILL")
    assert done.document["reason"].startswith("rank 1: the trial was killed, but not by the kernel")
    with Store.open(str(store_file)) as store:
        assert store.count(outcome="crashed") == 1


def test_a_rank_that_hangs_in_a_collective(autofit: Autofit, on_two: None) -> None:
    arguments = ("trial", "--model", "./rank_1_hangs", *ON_TWO[2:], "--config", "sharding=ddp", "--deadline")
    waiting = "in phase forward (rank 0 waiting in phase backward)"
    done, deadline = within(
        lambda seconds: autofit(*arguments, f"{seconds:.0f}s"), lambda done: waiting in done.out, *(2.0, 15.0)
    )
    assert (done.code, done.err) == (3, "")
    assert f"timed out: rank 1: not finished after {deadline:.0f} s, {waiting}" in done.out


def test_a_search_goes_on_when_ranks_die_and_hang(
    autofit: Autofit, on_two: None, tmp_path: Path, store_file: Path
) -> None:
    named = space(tmp_path, method="full", precision="bf16", micro_batch="2", sharding="fsdp, fsdp-no-reshard, ddp")
    arguments = ("search", "--model", "./fsdp_fails", *ON_TWO[2:], "--in-place", "--no-predict", "--space", named)
    done = autofit(*arguments, "--memory-limit", "2GiB", "--json")
    assert done.code == 0, done.err
    assert done.document["recommendation"]["config"]["sharding"] == "ddp"
    with Store.open(str(store_file)) as store:
        ended = Counter((trial.config["sharding"], trial.outcome.kind) for trial in store.trials())
    assert ended == {("fsdp", "timed_out"): 1, ("fsdp-no-reshard", "crashed"): 2, ("ddp", "fits"): 2}


def test_memory_that_is_too_small(autofit: Autofit, on_two: None) -> None:
    done = autofit("trial", *ON_TWO, "--config", "sharding=ddp", "--memory-limit", "1MiB", "--json")
    assert (done.code, done.document["outcome"]) == (3, "out_of_memory"), done
    assert done.document["reason"].startswith("rank ")
    done = autofit("trial", *ON_TWO, "--config", "sharding=ddp", "--memory-limit", "900TiB")
    check(done, 2, "memory-limit 900.00 TiB for each of 2 ranks is more than the")


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nor anything that one has made."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    compilation.missing_tool.cache_clear()
    yield
    compilation.missing_tool.cache_clear()


@pytest.mark.usefixtures("no_compiler", "on_two")
def test_without_a_compiler(autofit: Autofit, tmp_path: Path) -> None:
    """What needs one is left out of a search, and a trial of it says what is missing."""
    lacking = "DeepSpeed's cpu_adam cannot be compiled without a compiler (no-such-compiler)"
    done = autofit("trial", *ON_TWO, "--config", "sharding=zero2,offload=optimizer")
    assert (done.code, done.err) == (2, "")
    assert f"unsupported: {lacking} (apt-get install build-essential python3-dev)" in done.out
    done = autofit(
        "search",
        *ON_TWO,
        "--in-place",
        "--space",
        space(tmp_path, method="full", sharding="zero2", offload="optimizer"),
    )
    check(done, 2, "has no config for this search", lacking)
    named = space(
        tmp_path, method="full", precision="bf16", micro_batch="2", sharding="zero2, ddp", offload="optimizer, none"
    )
    done = autofit("search", *ON_TWO, "--space", named, "--dry-run", "--json")
    assert done.code == 0, done.err
    assert done.document["configs"] == 2
    assert any(reason.startswith(lacking) for reason in done.document["unsupported"])


@pytest.mark.usefixtures("no_compiler")
def test_the_doctor_says_what_cannot_be_compiled() -> None:
    operation = doctor._operation("cpu_adam", build=True)
    assert (operation.state, operation.remedy) == ("missing", "apt-get install build-essential python3-dev")
    assert operation.found == "DeepSpeed's cpu_adam cannot be compiled without a compiler (no-such-compiler)"


@pytest.mark.usefixtures("no_compiler")
def test_the_doctor_who_cannot_build_what_every_offload_needs_ends_with_4(
    autofit: Autofit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_trial", lambda device, hardware: "a small trial ran in 1.0 s")
    arguments = ("doctor", "--device", "cpu", "--no-ray", "--json")
    done = autofit(*arguments, "--build-ops")
    assert done.code == 4
    assert [check["name"] for check in done.document if check["state"] == "missing"] == ["deepspeed cpu_adam"]
    assert autofit(*arguments).code == 0, "a search without offload needs none of them"


@pytest.fixture
def files(ranks_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for offload=nvme, which is there and empty."""
    ranks_folder.mkdir(exist_ok=True)
    monkeypatch.setenv(NVME_VARIABLE, str(ranks_folder))
    return ranks_folder


NVME = "sharding=zero3,offload=nvme,precision=bf16-mixed"


def without_room(files: Path, patch: pytest.MonkeyPatch) -> str:
    usage = namedtuple("usage", ("total", "used", "free"))
    patch.setattr(shutil, "disk_usage", lambda folder: usage(2**40, 2**40 - 4096, 4096))
    return f"MiB in {files}, which has 4 KiB free (free some space there, or set {NVME_VARIABLE} to another folder)"


def unnamed(files: Path, patch: pytest.MonkeyPatch) -> str:
    patch.delenv(NVME_VARIABLE)
    return f"offload=nvme needs a folder on a fast disk, and none is set (set {NVME_VARIABLE} to one)"


def missing(files: Path, patch: pytest.MonkeyPatch) -> str:
    files.rmdir()
    return f"offload=nvme: there is no folder {files} (make it, or set {NVME_VARIABLE})"


def not_writable(files: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setenv(NVME_VARIABLE, "/proc/self")  # where nobody can write, root neither
    return f"offload=nvme: /proc/self cannot be written (No such file or directory) (set {NVME_VARIABLE} to another)"


@pytest.mark.usefixtures("on_two")
@pytest.mark.parametrize("lack", [unnamed, missing, not_writable, without_room])
def test_a_folder_that_files_cannot_go_to(
    autofit: Autofit, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lack: Lack
) -> None:
    """A trial says why; a search goes on without. What is compiled here does not matter."""
    monkeypatch.setattr(native_ops, "require", lambda config: None)
    expected = lack(files, monkeypatch)
    done = autofit("trial", *ON_TWO, "--config", NVME, "--json")
    assert (done.code, done.err, done.document["outcome"]) == (2, "", "unsupported")
    assert expected in done.document["reason"]
    axes = {"method": "full", "precision": "bf16-mixed", "micro_batch": "2", "sharding": "zero3"}
    done = autofit("search", *ON_TWO, "--in-place", "--space", space(tmp_path, **axes, offload="nvme"))
    check(done, 2, "has no config for this search", expected)
    done = autofit("search", *ON_TWO, "--dry-run", "--space", space(tmp_path, **axes, offload="nvme, none"), "--json")
    assert (done.code, done.document["configs"]) == (0, 1), done
    assert any(expected in reason for reason in done.document["unsupported"])


@pytest.mark.usefixtures("on_two", "compiled_files")
def test_files_train_two_ranks_and_are_gone_afterwards(autofit: Autofit, files: Path) -> None:
    done = autofit("trial", *ON_TWO, "--config", NVME, "--json")
    assert (done.code, done.document["outcome"]) == (0, "fits"), done
    assert len(done.document["measurement"]["ranks"]) == 2
    assert list(files.iterdir()) == []
