"""What the store knows of an ordinary run of a Trainer: what was faster, and what its own config took in a trial."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit.catalog.models import names
from autofit.core.errors import NothingFits, NotMeasured, UsageError
from autofit.core.frontier import Point, point, ties
from autofit.core.outcome import Fits, Trial
from autofit.core.units import format_bytes
from autofit.core.workload import Goal, Workload
from autofit.operations.recommendation import recommend, search_command
from autofit.planning.requests import hub_id
from autofit.store import NoStore, Store
from autofit.techniques.short_text import short
from autofit.trainers import training_arguments
from autofit.trainers.keys import Keys
from autofit.trainers.run import Run, Where
from autofit.trial.machine.detection import detect
from autofit.trial.program.command import Command

if TYPE_CHECKING:
    from transformers import TrainingArguments

DECIDED_AXES = ("micro_batch", "checkpointing", "optimizer", "loss", "compile")
"""The axes of which TrainingArguments decide whatever the script does; its weights and adapters are its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeasurements:
    """What was measured here of the workload that a run trains."""

    workload: Workload
    goal: Goal
    """The run's own method."""
    best: Point
    """The fastest of that method that fits this device."""
    trial: Trial | None
    """The latest trial that fitted with this run's settings; None if there is none."""
    has_length: bool
    """Whether it is known that the run's sequences are as long as the workload's."""

    def advice(self) -> str | None:
        """One sentence, where something measured is faster than this run's settings, or these were not measured."""
        fastest = f"autofit: {short(self.best.config)} was measured at {self.best.tokens_per_second:,.0f} tokens/s here"
        command = search_command(self.workload, self.goal).replace("autofit search", "autofit recommend", 1)
        run_point = None if self.trial is None else point(self.trial)
        if run_point is None:
            return f"{fastest}; this run's config was not measured. `{command}` says how to get it."
        gain = self.best.tokens_per_second / run_point.tokens_per_second - 1.0
        if run_point.config == self.best.config or gain <= 0.0 or ties(run_point, self.best):
            return None
        measured = f"this run's config (measured: {run_point.tokens_per_second:,.0f})"
        return f"{fastest}, {gain:.0%} faster than {measured}. `{command}` says how to get it."


def report(measurements: RunMeasurements | None, step_seconds: float, peak_bytes: int) -> str:
    """What a run took, beside what its settings took in a trial and what was predicted for them."""
    text = f"autofit: this run took {step_seconds:.3g} s a step and {format_bytes(peak_bytes)} at its peak"
    if measurements is None:
        return f"{text}."
    if measurements.has_length:
        text += f", {measurements.workload.tokens_per_step / step_seconds:,.0f} tokens/s"
    if measurements.trial is None or measurements.trial.measurement is None:
        return f"{text}; its config was not measured in a trial."
    measured, predicted = measurements.trial.measurement, measurements.trial.prediction
    text += f"; in its trial {measured.tokens_per_second:,.0f} tokens/s and {format_bytes(measured.device_bytes)}"
    return f"{text}." if predicted is None else f"{text}, of {format_bytes(predicted.device_bytes)} predicted."


def run_measurements(args: TrainingArguments, model: Any, script: str, store: str | None) -> RunMeasurements | None:
    """What a store knows of a run of `model` with these arguments by the program `script`; None if nothing fits or was
    measured. Raises `StoreError`, and `UsageError`."""
    run = training_arguments.read(Keys(args.to_dict(), "transformers"), Where(devices=args.world_size))
    seq_len = getattr(args, "max_length", None)
    goal = Goal(method=_method(model))
    name = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    try:
        with Store.open(store, create=False) as opened:
            workload = _workload(opened, run, name, script, seq_len)
            if workload is None:
                return None
            best = recommend(workload, goal=goal, store=opened).point
            fitted = opened.trials(hardware_key=detect()[0].key, workload_key=workload.key, outcome=Fits.kind)
    except (NothingFits, NotMeasured, NoStore):
        return None
    settings = {"method": goal.method, **{axis: run.config.get(axis) for axis in DECIDED_AXES}}
    alike = [t for t in fitted if all(t.config.get(axis) == value for axis, value in settings.items())]
    latest = max(alike, key=lambda t: t.trial_id or 0, default=None)
    return RunMeasurements(workload=workload, goal=goal, best=best, trial=latest, has_length=seq_len is not None)


def _method(model: Any) -> str:
    if not getattr(model, "peft_config", None):
        return "full"
    return "qlora" if getattr(model, "is_loaded_in_4bit", False) else "lora"


def _workload(store: Store, run: Run, name: str, script: str, seq_len: int | None) -> Workload | None:
    """The latest measured workload that the run trains: by its own program, else as transformers' Trainer."""
    measured = [
        w
        for w in store.workloads(hardware_key=detect()[0].key)
        if _is_named(w.model, name)
        and (w.global_batch, w.devices) == (run.global_batch, run.devices)
        and seq_len in (None, w.seq_len)
        and (w.program is None or _searches(w.program, script))
        and w.trainer in (None, "transformers")
    ]
    return min(measured, key=lambda w: (w.program is None, w.trainer is None), default=None)


def _searches(program: str, script: str) -> bool:
    """Whether a measured command starts the script with what a search varies, as that of a recorded run does not."""
    is_started = bool(script) and Path(script).name in {Path(word).name for word in shlex.split(program)}
    try:
        return is_started and bool(Command.parse(program).placeholders)
    except UsageError:  # of an earlier version
        return False


def _is_named(measured: str, name: str) -> bool:
    """Whether a workload's model is the one that was loaded from `name`: a hub id or a folder."""
    if not name or measured in (name, Path(name).name):
        return bool(name)
    return measured in names() and hub_id(measured).lower() == name.lower()
