"""The self-test's checks and what they have shown: values that a table and a bug report are made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.document import Document
from autofit.core.outcome import Crashed, Diverged, Fits, Trial, Unsupported

if TYPE_CHECKING:
    from autofit.operations.self_test.device_under_test import DeviceUnderTest

SCHEMA = 1
"""Version of the report's JSON."""


class Verdict(StrEnum):
    """What became of one check."""

    WORKS = "works"
    EMULATED = "emulated"
    """Works, but the device has no arithmetic for its number format."""
    REFUSED = "refused"
    """Cannot work here, known before anything ran."""
    DIFFERS = "differs"
    """Runs, and computes something else."""
    FAILED = "failed"
    NOT_RUN = "not run"


BAD = (Verdict.DIFFERS, Verdict.FAILED)
"""Verdicts that are defects, of autofit or of what is installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Document):
    """What one check has shown."""

    verdict: Verdict
    figure: str = ""
    """The figure that matters, for people."""
    reason: str = ""
    """Why it is not simply `works`; empty where it is."""
    remedy: str = ""
    """The command or step that mends it, where one is known."""
    seconds: float = 0.0
    """Wall time of the whole check."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """Further figures, by name with its unit; JSON values only."""
    trials: tuple[Trial, ...] = ()
    """What ran, in order."""
    predicted: Mapping[str, Any] | None = None
    """The estimate of the last trial's config, as `Estimate.to_json` gives it."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object. Hardware and stack are not repeated: the report has them."""
        trials = [{**trial.to_json(), "doubts": list(trial.doubts)} for trial in self.trials]
        for trial in trials:
            del trial["hardware"], trial["stack"], trial["trial_id"]
        return {**Document.to_json(self), "trials": trials}


def unfit(trial: Trial) -> Finding | None:
    """The finding for a trial without a measurement; None for one that fitted."""
    outcome = trial.outcome
    if isinstance(outcome, Fits):
        return None
    if isinstance(outcome, Unsupported):
        return Finding(verdict=Verdict.REFUSED, reason=outcome.reason, trials=(trial,))
    lines = outcome.stderr_tail.splitlines()[-3:] if isinstance(outcome, Crashed) else []  # the JSON has all
    reason = " | ".join([f"{outcome.kind}: {outcome.reason}", *(line.strip() for line in lines if line.strip())])
    verdict = Verdict.DIFFERS if isinstance(outcome, Diverged) else Verdict.FAILED
    return Finding(verdict=verdict, reason=reason, trials=(trial,))


def no_estimate(predicted: Mapping[str, Any]) -> str:
    """Why a check has failed whose trial was right, and for which the estimator had an error."""
    return f"trained as it should, but was not predicted: {predicted['error']}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing to find out."""

    name: str
    shows: str
    """What it is for, in one sentence."""
    run: Callable[[DeviceUnderTest, float], Finding]
    """Called with the monotonic time by which it is to end; whatever it raises is a failure of this check alone."""
    technique: bool = False
    """Whether it is one value of one axis."""
    most_seconds: float = 45.0
    """It is cut after so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """A check with what it has shown."""

    check: Check
    finding: Finding

    @property
    def name(self) -> str:
        return self.check.name

    def to_json(self) -> dict[str, Any]:
        named = {"name": self.name, "shows": self.check.shows, "technique": self.check.technique}
        return named | self.finding.to_json()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Document):
    """A self-test, complete or cut off."""

    autofit: str
    """autofit's version."""
    hardware: Hardware
    stack: Stack
    absent: Mapping[str, str]
    """Packages that are not installed, each with what mends that."""
    environment: Mapping[str, str]
    """Environment variables that change what the libraries do."""
    load_average: float
    """Processes that wanted a core in the minute before: with more than the cores, small steps take longer."""
    started_at: str
    time_limit_seconds: float
    seconds: float
    """Wall time so far."""
    checks: tuple[CheckResult, ...]
    """Those that have ended, in that order."""
    pending: tuple[str, ...] = ()
    """Names of the checks still to come; empty once all have ended."""

    @property
    def bad(self) -> tuple[CheckResult, ...]:
        """The checks that show a defect."""
        return tuple(checked for checked in self.checks if checked.finding.verdict in BAD)

    @property
    def summary(self) -> str:
        """All of it in one or two sentences."""
        counts = Counter(checked.finding.verdict for checked in self.checks if checked.check.technique)
        named = {verdict: [c.name for c in self.checks if c.finding.verdict is verdict] for verdict in Verdict}
        parts = [f"{counts[Verdict.WORKS] + counts[Verdict.EMULATED]} of {counts.total()} techniques work"]
        if refused := counts[Verdict.REFUSED]:
            parts.append(f"{refused} {'is' if refused == 1 else 'are'} refused")
        if not_run := counts[Verdict.NOT_RUN]:
            parts.append(f"{not_run} {'was' if not_run == 1 else 'were'} not run")
        if emulated := named[Verdict.EMULATED]:
            parts.append(f"emulated: {', '.join(emulated)}")
        parts += [f"{name} computes something else" for name in named[Verdict.DIFFERS]]
        parts += [f"{name} failed" for name in named[Verdict.FAILED]]
        summary = "; ".join(parts) + "."
        trials = [trial for checked in self.checks for trial in checked.finding.trials]
        if doubted := [trial.doubts[0] for trial in trials if trial.doubts]:
            summary += f" Speeds may be off in {len(doubted)} of {len(trials)} trials ({doubted[-1]})."
        return summary + (f" Cut off with {len(self.pending)} checks to go." if self.pending else "")

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "autofit": self.autofit, "summary": self.summary, **Document.to_json(self)}
