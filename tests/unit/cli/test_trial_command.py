"""`autofit trial` for real: one config of a tiny model, run in a child and told as the design says."""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event, main_thread

import pytest
from jobs import model_in
from kept import Kept
from unit.cli.conftest import Autofit
from unit.store.test_store_failures import locked

from autofit.core.units import MIB
from autofit.operations import single_trial
from autofit.store import Store
from autofit.store import trial_log as keeping
from autofit.trial.attempt import Attempt
from autofit.trial.process.classify import timed_out
from autofit.trial.process.runner import TrialRunner
from autofit.trial.request import TrialRequest

KEYS = {"outcome", "config", "hardware", "stack", "workload"}
KEYS_BESIDES = {"memory_limit_bytes", "seconds", "recorded_at", "trial_id", "device_state"}


@pytest.fixture(scope="module")
def kept(warm: TrialRunner) -> Kept:
    return Kept(warm, changed=lambda request: replace(request, timing_seconds=0.0))


@pytest.fixture(autouse=True)
def one_parent(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_trial, "GroupRunner", kept)


def test_an_interrupted_trial_tells_what_it_has_shown(
    autofit: Autofit, store_file: Path, workload: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging:
        """In place of `GroupRunner`: its trial ends when the user interrupts it, and not before."""

        def __init__(self, **options: object) -> None:
            self.interrupted = Event()

        def __enter__(self) -> Hanging:
            return self

        def __exit__(self, *error: object) -> None:
            self.interrupted.set()

        def attempt(self, request: TrialRequest) -> Attempt:
            main = main_thread().ident or 0
            while "result" not in {frame.name for frame in traceback.extract_stack(sys._current_frames()[main])}:
                time.sleep(0.01)  # until the command waits for the trial
            signal.pthread_kill(main, signal.SIGTERM)
            self.interrupted.wait()
            outcome = timed_out(deadline_seconds=9.0, phase="backward", phases_entered=3, peak_bytes=5 * MIB)
            return Attempt(outcome=outcome, seconds=9.0)

        def interrupt(self) -> None:
            self.interrupted.set()

        close = interrupt

    monkeypatch.setattr(single_trial, "GroupRunner", Hanging)
    done = autofit("trial", *workload, "--config", "method=lora", "--json")
    assert done.code == 130
    expected = {"outcome": "interrupted", "phase": "backward", "peak_bytes": 5 * MIB}
    assert expected.items() <= done.document.items()
    assert done.document["config"]["method"] == "lora"
    done = autofit("trial", *workload, "--config", "method=lora")
    assert done.code == 130 and "5 MiB" in done.out
    with Store.open(str(store_file)) as store:
        assert store.count() == 0


@pytest.fixture
def workload(tmp_path: Path) -> tuple[str, ...]:
    """The workload options of a model whose step takes a moment."""
    model_in(tmp_path / "tiny")
    return ("--model", "./tiny", "--seq-len", "32", "--global-batch", "4", "--device", "cpu")


def test_a_trial_that_fits(autofit: Autofit, store_file: Path, workload: tuple[str, ...]) -> None:
    done = autofit("trial", *workload, "--config", "micro_batch=2,precision=bf16", "--memory-limit", "2GiB", "--json")
    assert done.code == 0, done.err
    trial = done.document
    assert set(trial) == KEYS | KEYS_BESIDES | {"measurement"}
    assert (trial["outcome"], trial["workload"]["model"]) == ("fits", "tiny")
    assert (trial["config"]["micro_batch"], trial["config"]["method"]) == (2, "full")
    measured = trial["measurement"]
    assert set(measured["phase_peaks"]) == {"forward", "backward", "optimizer"}
    assert measured["tokens_per_second"] == pytest.approx(128 / measured["step_seconds"]["median"], rel=1e-3)
    assert measured["loss"]["first"] == pytest.approx(6.24, abs=0.3)  # ln 512: nothing is learnt yet
    with Store.open(str(store_file)) as store:
        stored = store.trial(trial["trial_id"])
    assert stored is not None and json.loads(json.dumps(stored.to_json())) == trial


def test_a_store_that_fails_does_not_cost_the_outcome(
    autofit: Autofit, store_file: Path, workload: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "PATIENCE_SECONDS", 0.0)
    attempt = TrialRunner.attempt
    with ExitStack() as lock:

        def locks_the_store(runner: TrialRunner, request: TrialRequest) -> Attempt:
            lock.enter_context(locked(store_file))
            return attempt(runner, request)

        monkeypatch.setattr(TrialRunner, "attempt", locks_the_store)
        url = f"sqlite:///{store_file}?timeout=0.1"
        done = autofit("trial", *workload, "--config", "method=lora", "--deadline", "50ms", "--json", "--store", url)
    assert done.code == 4
    trial = done.document
    assert (trial["outcome"], trial["trial_id"]) == ("timed_out", None)
    last = done.err.splitlines()[-1]
    assert "locked by another process" in last and "autofit db import" in last
    (file,) = store_file.parent.glob("autofit-unsaved-*.jsonl")
    assert str(file) in last
    assert autofit("db", "import", str(file)).out == "1 trials added, 0 were there already\n"
    with Store.open(str(store_file)) as store:
        assert store.count(outcome="timed_out") == 1


def test_what_cannot_work_is_refused_before_anything_runs(
    autofit: Autofit, store_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("a trial was started")

    monkeypatch.setattr(TrialRunner, "attempt", never)
    sizes = {"n_embd": 64, "dff": 128, "n_layer": 1, "n_head": 4, "vocab_size": 512, "n_positions": 256}
    model_in(tmp_path / "ctrl", {"model_type": "ctrl", **sizes})
    arguments = ("--model", "./ctrl", "--seq-len", "32", "--global-batch", "4", "--device", "cpu", "--json")
    done = autofit("trial", *arguments, "--config", "checkpointing=full,attention=eager")
    assert done.code == 2
    assert done.document["outcome"] == "unsupported"
    assert "no checkpointing for ctrl" in done.document["reason"]


def test_a_trial_that_runs_out_of_memory(autofit: Autofit, store_file: Path, workload: tuple[str, ...]) -> None:
    done = autofit("trial", *workload, "--config", "method=full", "--memory-limit", "1MiB", "--json")
    assert done.code == 3, done.err
    trial = done.document
    assert trial["outcome"] == "out_of_memory"
    assert set(trial) == KEYS | KEYS_BESIDES | {"reason", "phase", "requested_bytes", "signal", "host"}
    assert trial["reason"]
    with Store.open(str(store_file)) as store:
        assert store.count(outcome="out_of_memory") == 1


def test_a_trial_beyond_its_deadline(autofit: Autofit, store_file: Path, workload: tuple[str, ...]) -> None:
    done = autofit("trial", *workload, "--config", "method=full", "--deadline", "50ms")
    assert done.code == 3, done.err
    assert "timed out: " in done.out
    with Store.open(str(store_file)) as store:
        assert store.count(outcome="timed_out") == 1
