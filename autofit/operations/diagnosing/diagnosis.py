"""What is asked of a diagnosis, and what it answers, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autofit.estimate.estimate import Change, Estimate
from autofit.planning.requests import WorkloadOptions
from autofit.trainers.out_of_memory import ReportedOutOfMemory
from autofit.trainers.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change that helps, as the user would make it."""

    change: Change
    settings: Mapping[str, Any] = field(hash=False)
    """Key -> its new value; keys within another with dots, None for one that goes."""
    diff: str | None
    """Of the user's own file; None where its text cannot be edited without loss."""

    def to_json(self) -> dict[str, Any]:
        return {**self.change.to_json(), "settings": dict(self.settings), "diff": self.diff}


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The answer. Its verdict is known long before what helps: `remedies`, `in_script` and `notes_on_changes`."""

    run: Run
    options: WorkloadOptions
    estimate: Estimate
    """Of the file as it is (but see `emulated`). Its own advice is in `remedies`."""
    remedies: tuple[Remedy, ...] = ()
    in_script: Mapping[str, Change] = field(default_factory=dict, hash=False)
    """What the user's script may do -> what fits then. Empty where the file can say what trains the same."""
    notes: tuple[str, ...] = ()
    """How the card was found, and what else explains the verdict; one sentence each."""
    notes_on_changes: tuple[str, ...] = ()
    """What explains the changes, or that there are none; one sentence each."""
    failure: ReportedOutOfMemory | None = None
    emulated: str | None = None
    """Set where the card only emulates the file's bf16: everything else is then of the file with fp16 in its place."""

    @property
    def fits(self) -> bool:
        """Whether the file as it is does."""
        return self.estimate.likely_fits and self.emulated is None

    def to_json(self) -> dict[str, Any]:
        run = self.run
        return {
            "trainer": run.trainer,
            "model": self.options.model,
            "seq_len": self.options.seq_len,
            "global_batch": self.options.global_batch,
            "devices": self.options.devices,
            "estimate": replace(self.estimate, advice=()).to_json(),
            "changes": [remedy.to_json() for remedy in self.remedies],
            "in_script": [
                {"script": script, **{key: value for key, value in change.to_json().items() if key != "roles"}}
                for script, change in self.in_script.items()
            ],
            "assumed": list(run.assumed),
            "not_counted": [part.to_json() for part in run.not_counted],
            "unknown_keys": [key.to_json() for key in run.unknown],
            "notes": [*self.notes, *self.notes_on_changes],
            "emulated": self.emulated,
            "traceback": None if self.failure is None else self.failure.to_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisRequest:
    """What the user says beside the file; None where nothing is said."""

    hardware: str = "auto"
    trainer: str | None = None
    model: str | None = None
    seq_len: int | None = None
    devices: int | None = None
    memory_limit_bytes: int | None = None
    also: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Axes that the file does not decide, or that the user knows better."""
    failure: ReportedOutOfMemory | None = None
    """The error that the run ended with."""
