"""What every tracker is told of a trial, and what a tracker is."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, Protocol

from autofit.core.lattice import Value
from autofit.core.outcome import Fits, OutOfMemory, Trial
from autofit.core.workload import digest
from autofit.techniques.short_text import short

PROJECT = "autofit"
_PRIVATE_FIELDS = {"lengths", "program"}
"""Fields of a workload that no tracker gets: the lengths are many, and a user's command may hold a password."""


@dataclass(frozen=True)
class TrackedTrial:
    """A trial in a tracker's words: plain names, numbers and texts."""

    trial: Trial

    @cached_property
    def uid(self) -> str:
        """The trial's identity in every store, by which `autofit db import` recognises a repeat."""
        t = self.trial
        keys = (t.hardware.key, t.stack.key, t.workload.key, t.config.key)
        return digest([*keys, t.memory_limit_bytes, t.recorded_at, t.outcome.to_json()])

    @cached_property
    def context(self) -> str:
        """A readable name of the trial's hardware, stack and workload; trials with one name share a frontier."""
        t, w = self.trial, self.trial.workload
        words = [f"{w.model} on {t.hardware.name}", f"seq-len {w.seq_len}", f"batch {w.global_batch}"]
        words += [f"{w.devices} devices"] * (w.devices > 1) + [f"for {w.trainer}"] * (w.trainer is not None)
        key = digest([t.hardware.key, t.stack.key, w.key])[:8]
        return f"{', '.join([*words, f'torch {t.stack.torch}'])[:110]} [{key}]"  # W&B takes 128 characters

    @property
    def name(self) -> str:
        return short(self.trial.config)

    @property
    def fits(self) -> bool:
        return isinstance(self.trial.outcome, Fits)

    @property
    def ended(self) -> datetime:
        at = datetime.fromisoformat(self.trial.recorded_at)
        return at if at.tzinfo else at.replace(tzinfo=UTC)

    @property
    def started(self) -> datetime:
        return self.ended - timedelta(seconds=self.trial.seconds)

    @property
    def axes(self) -> dict[str, Value]:
        return dict(self.trial.config.to_json())

    @property
    def setting(self) -> dict[str, dict[str, Any]]:
        """Workload, hardware and stack, without fields that are unknown."""
        t = self.trial
        parts = {"workload": t.workload.to_json(), "hardware": t.hardware.to_json(), "stack": t.stack.to_json()}
        return {
            part: {name: value for name, value in values.items() if value is not None and name not in _PRIVATE_FIELDS}
            for part, values in parts.items()
        }

    @property
    def facts(self) -> dict[str, Any]:
        """How the trial ended, and why."""
        t = self.trial
        facts: dict[str, Any] = {"uid": self.uid, "trial_id": t.trial_id, "outcome": t.outcome.kind}
        facts |= {name: getattr(t.outcome, name, None) for name in ("reason", "phase")}
        facts |= {"stopped_early": (t.measurement is not None and t.measurement.stopped_early) or None}
        facts |= {"doubts": "; ".join(t.doubts) or None}
        return {name: value for name, value in facts.items() if value is not None}

    @property
    def metrics(self) -> dict[str, float]:
        """What was measured and what had been predicted, each with its unit in its name."""
        t = self.trial
        metrics: dict[str, float | None] = {"trial_seconds": t.seconds, "memory_limit_bytes": t.memory_limit_bytes}
        if (m := t.measurement) is not None:
            names = ("tokens_per_second", "mfu", "device_bytes", "peak_allocated_bytes", "peak_reserved_bytes")
            metrics |= {name: getattr(m, name) for name in (*names, "host_peak_bytes")}
            metrics |= {"step_seconds": m.step_seconds.median, "step_seconds_p95": m.step_seconds.p95}
            metrics |= {f"phase_peak_bytes/{phase}": peak for phase, peak in m.phase_peaks.items()}
        if isinstance(t.outcome, OutOfMemory):
            metrics["requested_bytes"] = t.outcome.requested_bytes
        if (p := t.prediction) is not None:
            metrics |= {f"predicted/{name}": getattr(p, name) for name in ("device_bytes", "peak_allocated_bytes")}
            metrics["predicted/step_seconds"] = p.step_seconds
            metrics["predicted/tokens_per_second"] = p.step_seconds and t.workload.tokens_per_step / p.step_seconds
        return {name: value for name, value in metrics.items() if value is not None}


class Tracker(Protocol):
    """Where trials are copied to. One thread at a time. Methods raise `EnvironmentLacks` where it cannot be reached."""

    @property
    def place(self) -> str:
        """The tracker's name and where it keeps trials, without any password."""

    @property
    def note(self) -> str | None:
        """What the user is to do or to know afterwards."""

    def uids(self, trial: TrackedTrial) -> set[str]:
        """The trials that it has already, at least those of this one's context; the caller adds to it."""

    def add(self, trial: TrackedTrial) -> None:
        """Keeps a trial that it does not have, as a run of its own."""
