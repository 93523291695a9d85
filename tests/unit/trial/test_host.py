"""The warm parent keeps its hands off the device, and waits until a trial's memory is back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import tiny_job, tiny_request
from unit.trial.fake_cuda import install_cuda
from unit.trial.fake_nvml import MIB, FakeCard, install

from autofit.errors import EnvironmentLacks
from autofit.hardware import Hardware
from autofit.outcome import Crashed, Fits
from autofit.techniques import Job
from autofit.trial import child, host, runner
from autofit.trial.commands import Commands
from autofit.trial.request import TrialRequest, seconds_since_asked
from autofit.trial.runner import TrialRunner, trial_environment

CARD = Hardware(name="h100-80g", kind="cuda", device_name="NVIDIA H100 80GB HBM3", memory_bytes=81089 * MIB)


@pytest.fixture
def fake_bitsandbytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bitsandbytes that initialises the device when it is imported, and leaves a trace of it."""
    trace = tmp_path / "imported"
    (tmp_path / "bitsandbytes").mkdir()
    (tmp_path / "bitsandbytes" / "__init__.py").write_text(
        f"import torch\nopen({str(trace)!r}, 'w').close()\ntorch.cuda.is_initialized = lambda: True\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return trace


def test_the_parent_of_gpu_trials_postpones_bitsandbytes(
    fake_bitsandbytes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    assert not runner.parent_touches_device("cuda")
    assert not fake_bitsandbytes.exists()


def test_a_parent_that_has_touched_the_device_starts_children_anew(
    fake_bitsandbytes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On the CPU nothing is postponed: the fake's import shows what the check would see.
    assert runner.parent_touches_device("cpu")
    assert fake_bitsandbytes.exists()
    code = """
from autofit.trial.host import Host
made = Host("entries:none", spawn=False)
made.preload(None)
print(made._spawn)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]


def test_a_postponed_library_counts_as_installed_and_can_be_imported_afterwards(fake_bitsandbytes: Path) -> None:
    code = """
import os, sys
os.environ["AUTOFIT_DEVICE_KIND"] = "cuda"
from autofit.trial.host import Host
Host("entries:none", spawn=False).preload("llama")
from peft.import_utils import is_bnb_available
from transformers.utils import is_bitsandbytes_available
assert "bitsandbytes" not in sys.modules
import importlib.util
assert is_bnb_available() and importlib.util.find_spec("bitsandbytes") is not None
import bitsandbytes
print(bitsandbytes.__file__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(fake_bitsandbytes.parent / "bitsandbytes" / "__init__.py")


def test_imports_that_fail_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "peft.py").write_text("raise ImportError('peft is broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EnvironmentLacks, match="peft is broken"):
        runner.parent_touches_device("cpu")


def test_trials_get_the_device_that_was_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeCard("GPU-a"), FakeCard("GPU-b"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert trial_environment("cuda")["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    assert trial_environment("cuda", 1)["CUDA_VISIBLE_DEVICES"] == "GPU-a", "the second rank's"
    assert trial_environment("cpu")["CUDA_VISIBLE_DEVICES"] == "1,0"


class _Device:
    """A card whose memory comes back some time after the trial has ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, back_after: float) -> None:
        self._card = FakeCard("GPU-a", used=1000 * MIB)
        install(monkeypatch, self._card)
        self._back_after = back_after
        monkeypatch.setattr(host, "_device_held", self._held)
        self._asked = 0
        self._ended = 0.0

    def _held(self) -> int:
        self._asked += 1
        if self._asked == 1:
            return 1000 * MIB
        self._ended = self._ended or time.monotonic()
        back = time.monotonic() - self._ended > self._back_after
        return 1000 * MIB if back else 60_000 * MIB


def _run_on_card(monkeypatch: pytest.MonkeyPatch, back_after: float) -> float:
    """Seconds that a trial took whose memory came back after so many seconds."""
    _Device(monkeypatch, back_after=back_after)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    read_end, write_end = os.pipe()
    try:
        _, seconds = host.Host("entries:killed", spawn=False).run({"hardware": {"kind": "cuda"}}, Commands(read_end))
    finally:
        os.close(write_end)
        os.close(read_end)
    return seconds


def test_the_next_trial_waits_for_the_devices_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0.5 <= _run_on_card(monkeypatch, back_after=0.5) < 2.0


def test_memory_that_never_comes_back_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "DEVICE_BACK_SECONDS", 0.3)
    assert 0.3 <= _run_on_card(monkeypatch, back_after=60.0) < 2.0


def test_a_full_disk_is_no_fault_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    with TrialRunner() as started:
        code = "import tempfile, sys; tempfile.tempdir = '/nowhere'; from autofit.trial.host import main; main()"
        started._command = [sys.executable, "-c", code, "--entry", "builtins:print"]
        outcome, _ = started.run(tiny_request())
        assert isinstance(outcome, Crashed) and outcome.transient
        assert "/nowhere" in outcome.reason


def test_a_parent_that_cannot_start_is_no_fault_of_the_config() -> None:
    with TrialRunner() as started:
        started._command = [sys.executable, "-c", "raise SystemExit(7)"]
        outcome, _ = started.run(tiny_request())
    assert isinstance(outcome, Crashed) and outcome.transient and outcome.exit_code == 7


def test_asking_is_the_first_writing_down() -> None:
    request = tiny_request()
    written: dict[str, Any] = json.loads(json.dumps(request.to_json()))
    time.sleep(0.05)
    passed_on = TrialRequest.from_json(written)
    assert passed_on == request
    again = json.loads(json.dumps(passed_on.to_json()))
    assert again["asked"] == written["asked"]
    assert 0.05 <= seconds_since_asked(again) < 5.0
    assert seconds_since_asked({**again, "asked": ["another boot", 1.0]}) == 0.0
    assert seconds_since_asked({}) == 0.0


def test_overhead_counts_from_the_asking(warm: TrialRunner) -> None:
    warm.run(tiny_request(timing_seconds=0.1))
    clock, now = tiny_request().to_json()["asked"]
    late, _ = warm.run(tiny_request(timing_seconds=0.1, asked=(clock, now - 5.0)))
    assert isinstance(late, Fits)
    assert 5.0 < late.measurement.overhead_seconds < 10.0


def test_a_busy_device_is_a_transient_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    install_cuda(monkeypatch, others=20_000 * MIB)
    on_cpu = tiny_job()
    job = Job(model=on_cpu.model, workload=on_cpu.workload, hardware=CARD, stack=on_cpu.stack)
    request = tiny_request(job=job, memory_limit_bytes=20_000 * MIB)
    outcome = child._run(request, child.Events(2), time.monotonic()).outcome
    assert isinstance(outcome, Crashed) and outcome.transient, outcome
    assert "other processes hold 19.53 GiB" in outcome.reason
