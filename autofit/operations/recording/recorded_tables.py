"""Recorded tables for replays, read strictly: errors name the row."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.core.device.probe import Probe
from autofit.core.errors import AutofitError, UsageError
from autofit.core.hardware import Hardware, Stack
from autofit.core.lattice import Config
from autofit.core.outcome import (
    Fits,
    Measurement,
    Outcome,
    OutOfMemory,
    TimedOut,
    Trial,
    machinery_failed,
    outcome_from_json,
)
from autofit.core.workload import Workload
from autofit.operations.recording.pooling import contradicting, pooled
from autofit.operations.recording.record import BESIDE_OUTCOME, SAME, SCHEMA
from autofit.techniques import complete

WIDEST = 1000.0
"""Relative spread that no timing has: steps that differ as much are a clock's mistake."""
NEVER_NEGATIVE = (
    *("peak_allocated_bytes", "peak_reserved_bytes", "host_peak_bytes", "host_baseline_bytes", "setup_peak_bytes"),
    *("setup_seconds", "overhead_seconds", "leak_bytes_per_step"),
)
"""Fields of a measurement besides those with bounds of their own."""
SAME_SPEED = 0.01
"""Relative difference between a trial's two statements of its speed that rounding explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTable:
    """A search space as it was measured on one machine."""

    file: Path
    hardware: Hardware
    stack: Stack
    workload: Workload
    memory_limit_bytes: int
    trials: tuple[Trial, ...]
    """One per config, however many passes were recorded."""
    contradicting: tuple[Config, ...] = ()
    """Configs that fitted in one pass but not in another; they count as not fitting."""
    probe: Probe | None = None
    """What a probe of the device showed before the first trial; None where none was taken."""

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return self.file.stem


def read_whole(file: Path) -> RecordedTable:
    """The table in `file`, with its passes pooled. Raises `UsageError`, naming the row, for a table that is cut off,
    empty, of another schema or of several recordings, or that has a config twice in one pass or an impossible value.

    A table that ends with a whole row may be an unfinished recording, or one of `--max-trials`: it is read as it is."""
    rows = _rows(file)
    header = _header(file, rows[0])
    try:
        hardware, stack = Hardware.from_json(header["hardware"]), Stack.from_json(header["stack"])
        workload = Workload.from_json(header["workload"])
    except (AutofitError, TypeError, ValueError) as error:
        raise _wrong(file, 1, f"not a header that this version reads: {error}") from error
    limit, there = header["memory_limit_bytes"], hardware.memory_bytes
    if not _is_number(there) or there <= 0:
        raise _wrong(file, 1, f"memory_bytes of the hardware is {_shortened(there)}, and must be above 0")
    if not _is_number(limit) or not 0 < limit <= there:
        raise _wrong(
            file, 1, f"memory_limit_bytes is {_shortened(limit)}, and must be above 0 and at most the device's {there}"
        )
    trials: dict[Config, list[Trial]] = {}
    first: dict[tuple[int, Config], int] = {}
    for number, row in enumerate(rows[1:], start=2):
        config, outcome, seconds = _measured(file, number, row, workload, limit)
        earlier = first.setdefault((_pass(file, number, row), config), number)
        if earlier != number:
            raise _wrong(file, number, f"repeats the config of row {earlier}: {config}")
        trial = Trial(
            config=config,
            workload=workload,
            hardware=hardware,
            stack=stack,
            memory_limit_bytes=limit,
            outcome=outcome,
            seconds=seconds,
            recorded_at=str(header.get("recorded_at", "")),
        )
        trials.setdefault(config, []).append(trial)
    if not trials:
        raise UsageError(f"{file} is empty: it has a header and no trial; `autofit bench record` resumes from there")
    return RecordedTable(
        file=file,
        hardware=hardware,
        stack=stack,
        workload=workload,
        memory_limit_bytes=limit,
        trials=tuple(pooled(trials).values()),
        contradicting=tuple(contradicting(trials)),
        probe=_probe(file, header),
    )


def _probe(file: Path, header: dict[str, Any]) -> Probe | None:
    if header.get("probe") is None:
        return None
    try:
        return Probe.from_json(header["probe"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _wrong(file, 1, f"not a probe that this version reads: {error}") from error


def is_table(file: Path) -> bool:
    """Whether the file begins like a recorded table, of whatever schema."""
    try:
        with file.open(encoding="utf-8") as lines:
            header = json.loads(lines.readline())
    except (OSError, ValueError):
        return False
    return isinstance(header, dict) and "space" in header and "workload" in header


def _rows(file: Path) -> list[dict[str, Any]]:
    """The lines as JSON objects, the header first."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    lines = text.splitlines()
    if not lines:
        raise UsageError(f"{file} is empty: `autofit bench record --out {file}` writes a table")
    if not text.endswith("\n"):
        raise _wrong(file, len(lines), "cut off: the same `autofit bench record` resumes from there")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line, parse_constant=_no_number)
        except ValueError as error:
            raise _wrong(file, number, f"not JSON: {error}") from error
        if not isinstance(row, dict):
            raise _wrong(file, number, "not a JSON object")
        rows.append(row)
    return rows


def _header(file: Path, row: dict[str, Any]) -> dict[str, Any]:
    if row.get("schema") != SCHEMA:
        raise _wrong(file, 1, f"schema {row.get('schema')!r}, and this version reads {SCHEMA}")
    missing = [name for name in SAME if name not in row]
    if missing:
        raise _wrong(file, 1, f"not the first line of `autofit bench record`: {', '.join(missing)} missing")
    return row


def _measured(
    file: Path, number: int, row: dict[str, Any], workload: Workload, limit: int
) -> tuple[Config, Outcome, float]:
    if "schema" in row:
        raise _wrong(file, number, "the header of another recording: a file can hold only one")
    try:
        config = Config.from_json(row["config"])
        if complete(row["config"]) != config:
            raise ValueError("its config does not name every axis")
        if workload.batch_per_device % config.number("micro_batch"):
            batch = workload.batch_per_device
            raise ValueError(f"micro_batch={config['micro_batch']} does not divide the {batch} sequences of a device")
        outcome = outcome_from_json({k: v for k, v in row.items() if k not in BESIDE_OUTCOME})
        seconds = row["seconds"]
    except KeyError as error:
        raise _wrong(file, number, f"{error.args[0]} is missing") from error
    except (AutofitError, AttributeError, TypeError, ValueError) as error:
        raise _wrong(file, number, str(error)) from error
    reason = _impossible(outcome, seconds, workload, limit)
    if reason is not None:
        raise _wrong(file, number, reason)
    return config, outcome, float(seconds)


def _pass(file: Path, number: int, row: dict[str, Any]) -> int:
    found = row.get("pass", 1)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise _wrong(file, number, f"pass is {found!r}, and must be a whole number from 1 on")
    return found


def _impossible(outcome: Outcome, seconds: Any, workload: Workload, limit: int) -> str | None:
    """Why no trial can have given these values; None if one can."""
    if machinery_failed(outcome):
        return "a failure of the machinery says nothing about its config"
    above_zero: dict[str, Any] = {"seconds": seconds}
    if isinstance(outcome, Fits):
        measured = outcome.measurement
        above_zero["tokens_per_second"] = measured.tokens_per_second
        above_zero["step_seconds.median"] = measured.step_seconds.median
        above_zero["step_seconds.p95"] = measured.step_seconds.p95
        memory, spread = measured.device_bytes, measured.step_seconds.relative_spread
        if not _is_number(memory) or not 0 <= memory <= limit:
            return f"device_bytes is {memory!r}: what fits has at least 0 and at most the limit of {limit}"
        if spread is not None and (not _is_number(spread) or not 0 <= spread <= WIDEST):
            return f"step_seconds.relative_spread is {spread!r}, and must be between 0 and {WIDEST:g}"
        never_negative = {name: getattr(measured, name) for name in NEVER_NEGATIVE}
        if not isinstance(measured.phase_peaks, dict):
            return f"phase_peaks is {_shortened(measured.phase_peaks)}, and must be an object of bytes by phase"
        never_negative |= {f"phase_peaks.{phase}": peak for phase, peak in measured.phase_peaks.items()}
        if measured.mfu is not None:
            never_negative["mfu"] = measured.mfu
        for name, value in never_negative.items():
            if not _is_number(value) or value < 0:
                return f"{name} is {_shortened(value)}, and must be at least 0"
        above_zero["steps"] = measured.steps
        if not measured.losses or not all(map(_is_number, measured.losses)):
            return f"losses is {_shortened(list(measured.losses))}, and must have a number for each step"
        if not all(norm is None or _is_number(norm) for norm in measured.gradient_norms):
            return f"gradient_norms is {_shortened(list(measured.gradient_norms))}, and must have numbers or null"
        if measured.stopped_early is not False:
            return f"stopped_early is {measured.stopped_early!r}, and every trial of a table runs to its end"
    elif isinstance(outcome, TimedOut):
        above_zero["deadline_seconds"] = outcome.deadline_seconds
    elif isinstance(outcome, OutOfMemory) and outcome.requested_bytes is not None:
        above_zero["requested_bytes"] = outcome.requested_bytes
    for name, value in above_zero.items():
        if not _is_number(value) or value <= 0:
            return f"{name} is {_shortened(value)}, and must be above 0"
    return _contradictory(outcome.measurement, seconds, workload) if isinstance(outcome, Fits) else None


def _contradictory(measured: Measurement, seconds: float, workload: Workload) -> str | None:
    """Which figures of a trial, each possible alone, cannot go together; None if all can."""
    steps = measured.step_seconds
    speed = workload.tokens_per_step / steps.median
    if not math.isclose(speed, measured.tokens_per_second, rel_tol=SAME_SPEED):
        return f"tokens_per_second is {measured.tokens_per_second!r}, and its step_seconds.median makes it {speed!r}"
    if steps.p95 < steps.median:
        return f"step_seconds.p95 is {steps.p95!r}, and must be at least its median of {steps.median!r}"
    peak = measured.peak_allocated_bytes
    for name in ("device_bytes", "peak_reserved_bytes"):
        if (value := getattr(measured, name)) < peak:
            return f"{name} is {value!r}, and must be at least its peak_allocated_bytes of {peak!r}"
    least = measured.setup_seconds - measured.overhead_seconds  # the trial need not have begun when it was requested
    if seconds < least:
        return f"seconds is {seconds!r}, and building and warming up alone took {least:.3g} of them"
    return None


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:20]}...{text[-10:]}"


def _is_number(value: Any) -> bool:
    """Whether `value` is a number that a float can hold."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _wrong(file: Path, number: int, reason: str) -> UsageError:
    return UsageError(f"{file}, row {number}: {reason}")
