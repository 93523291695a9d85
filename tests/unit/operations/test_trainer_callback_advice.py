"""What `autofit.TrainerCallback` says of an ordinary run, from trials that the store has."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import tiny_job
from transformers import Trainer, TrainingArguments
from unit.operations.made_trials import fits, make_trial

import autofit
from autofit.core.units import GIB
from autofit.core.workload import Workload
from autofit.operations.trainer_callback import callback
from autofit.store import Store
from autofit.techniques import Job

PROGRAM = "python train.py {micro_batch} {checkpointing}"


class Model(torch.nn.Module):
    """As small as can be; its config says where it was loaded from."""

    def __init__(self, loaded_from: str = "/models/tiny") -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.config = type("Config", (), {"_name_or_path": loaded_from, "to_json_string": lambda self: "{}"})()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * x).mean()}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The user's store, still empty; the run is of the program that was searched."""
    monkeypatch.setenv("AUTOFIT_STORE", str(tmp_path / "store.db"))
    monkeypatch.setattr(sys, "argv", ["train.py"])
    return str(tmp_path / "store.db")


def measured(store: str, speeds: dict[int, float], job: Job | None = None) -> Workload:
    """Stores a trial for each micro-batch, of full training without checkpointing."""
    job = job or tiny_job(program=PROGRAM)
    with Store.open(store) as opened:
        for micro_batch, speed in speeds.items():
            opened.add(make_trial({"micro_batch": micro_batch}, fits(1.0, speed), job=job, limit=2 * GIB))
    return job.workload


def train(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    model: torch.nn.Module | None = None,
    *,
    rows: int = 64,
    max_steps: int = 4,
    **more: Any,
) -> list[str]:
    """What is said in a run with micro-batch 2 and two micro-steps."""
    options: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **more}
    quiet: dict[str, Any] = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    args = TrainingArguments(output_dir=str(tmp_path / "out"), max_steps=max_steps, **options, **quiet)
    data: Any = [{"x": torch.ones(2)}] * rows
    trainer = Trainer(
        model=model or Model(),
        args=args,
        train_dataset=data,
        eval_dataset=data[:2],
        callbacks=[autofit.TrainerCallback()],
    )
    with caplog.at_level(logging.WARNING, logger="autofit"):
        trainer.train()
    return [message for message in caplog.messages if message.startswith("autofit:")]


def test_a_faster_config_is_told_at_the_start_and_what_the_run_took_at_its_end(
    store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    measured(store, {2: 1000.0, 4: 1310.0})
    first, last = train(tmp_path, caplog)
    assert "micro-batch 4" in first and "1,310 tokens/s here, 31% faster than" in first
    assert "(measured: 1,000)" in first and "autofit recommend --model tiny --seq-len 32 --global-batch 4 " in first
    assert "--command 'python train.py {micro_batch} {checkpointing}'" in first
    assert "this run took" in last and "in its trial 1,000 tokens/s and 1.00 GiB" in last
    assert last.count("tokens/s") == 1  # how long the run's own sequences are is not known


def test_evaluations_and_the_ends_of_epochs_are_in_no_step_that_is_told(
    store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the run that is stored, and in trials. By a clock that the model moves."""
    now = [0.0]
    monkeypatch.setattr(callback, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow(Model):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            now[0] += 0.25 * len(x) if self.training else 100.0
            return super().forward(x)

    # Epochs of four whole steps and a short one, and an evaluation after step 7: 3, 4 and 7 are timed.
    (last,) = train(tmp_path, caplog, Slow(), rows=18, max_steps=9, eval_strategy="steps", eval_steps=7)
    assert "this run took 1 s a step" in last


def test_the_fastest_config_needs_no_advice(store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    measured(store, {2: 1310.0, 4: 1000.0})
    (last,) = train(tmp_path, caplog)
    assert "this run took" in last


def test_another_method_is_no_advice(store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a model with adapters, what was measured of full training; and the other way round."""
    job = measured(store, {2: 1000.0})
    with Store.open(store) as opened:
        faster = {"method": "lora", "rank": 8, "targets": "all-linear", "micro_batch": 4}
        opened.add(make_trial(faster, fits(1.0, 2000.0), job=tiny_job(program=job.program), limit=2 * GIB))
    (last,) = train(tmp_path, caplog)
    assert "in its trial 1,000 tokens/s" in last
    caplog.clear()
    adapted = Model()
    adapted.peft_config = {"default": None}
    first, _ = train(tmp_path, caplog, adapted)
    assert "2,000 tokens/s here" in first and "--method lora" in first


def test_a_config_without_a_trial_is_compared_with_none(
    store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    measured(store, {4: 1310.0})
    first, last = train(tmp_path, caplog)
    assert "this run's config was not measured" in first and "its config was not measured in a trial" in last


def test_the_latest_trial_is_compared_whatever_the_libraries(
    store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = tiny_job(program=PROGRAM)
    later = replace(job, stack=replace(job.stack, torch="2.99.0"))
    for speeds, of in (({2: 900.0}, job), ({2: 1000.0}, later), ({4: 800.0}, job)):
        measured(store, speeds, of)
    *_, last = train(tmp_path, caplog)
    assert "in its trial 1,000 tokens/s" in last


@pytest.mark.parametrize(
    "other",
    [
        tiny_job(program="python other.py {micro_batch}"),
        tiny_job(program=PROGRAM, global_batch=8),
        tiny_job(trainer="trl"),
    ],
)
def test_what_was_measured_of_another_workload_is_not_told(
    store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, other: Job
) -> None:
    measured(store, {2: 1000.0, 4: 2000.0}, other)
    (last,) = train(tmp_path, caplog)
    assert last.endswith("at its peak.")


def test_the_models_name_decides(store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = tiny_job()
    smol = replace(job, workload=replace(job.workload, model="smollm2-135m"))
    measured(store, {2: 1000.0, 4: 2000.0}, smol)
    first, _ = train(tmp_path, caplog, Model("HuggingFaceTB/SmolLM2-135M"))
    assert "100% faster" in first
    caplog.clear()
    (last,) = train(tmp_path, caplog, Model(""))
    assert last.endswith("at its peak.")


def test_no_store_and_a_broken_one_cost_a_line_at_most(
    store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (last,) = train(tmp_path, caplog)
    assert "this run took" in last
    caplog.clear()
    Path(store).write_text("this is no database, " * 100)
    first, last = train(tmp_path, caplog)
    assert first.startswith("autofit: nothing to say of this run:") and "this run took" in last
