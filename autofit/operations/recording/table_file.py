"""Recorded tables: a file with a header, and a row for every trial. Read strictly: errors name the row."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.device.probe import Probe
from autofit.core.errors import AutofitError, UsageError
from autofit.core.lattice import Config
from autofit.core.outcome import Fits, Trial, machinery_failed
from autofit.core.workload import Workload
from autofit.store.exchange import checked, config_of, outcome_of, read_values
from autofit.techniques import complete
from autofit.trial.attempt import Attempt

SCHEMA = 1
"""Format version of a recorded table, given in its first line."""
SAME = ("hardware", "stack", "workload", "space", "memory_limit_bytes")
"""The header fields that must agree for a recording to be continued; of the hardware, its key must."""
ROW_FIELDS = {"config", "seconds", "device_state"}
"""What a row has besides a trial's outcome; `device_state` is absent where it was not observed."""


@dataclass(frozen=True, kw_only=True)
class RecordedTable:
    """A search space as it was measured on one machine."""

    file: Path
    header: dict[str, Any]
    """As it is written."""
    hardware: Hardware
    stack: Stack
    workload: Workload
    memory_limit_bytes: int
    trials: tuple[Trial, ...] = ()
    """One per config, in the order in which they ran."""
    probe: Probe | None = None
    """What a probe of the device showed before the first trial; None where none was taken."""

    @property
    def name(self) -> str:
        return self.file.stem


def read_table(file: Path, *, whole: bool = False) -> RecordedTable:
    """The table in `file`. Raises `UsageError`, naming the row, for anything that no recording writes.

    An unfinished last line is left out. If the table is to be `whole`, it is refused, and so is one without a trial.
    """
    lines, refused = _lines(file, whole=whole), partial(wrong, file)
    values = read_values(lines, chain([partial(_of_header, file)], repeat(lambda body: _trial(table, body))), refused)
    header = next(values, None)
    if header is None:
        raise UsageError(f"{file} is empty: it has no header")
    table: RecordedTable = header[1]
    rows: dict[Config, int] = {}
    trials: list[Trial] = []
    for number, trial in values:
        if (earlier := rows.setdefault(trial.config, number)) != number:
            raise wrong(file, number, f"repeats the config of row {earlier}: {trial.config}")
        trials.append(trial)
    if whole and not trials:
        raise UsageError(f"{file} is empty: it has a header and no trial; `autofit bench record` resumes from there")
    return replace(table, trials=tuple(trials))


def _of_header(file: Path, header: dict[str, Any]) -> RecordedTable:
    """The table without its trials. Raises `ValueError` for what is no header that this version reads."""
    if header.get("schema") != SCHEMA:
        raise ValueError(f"schema {header.get('schema')!r}, and this version reads {SCHEMA}")
    missing = [name for name in SAME if name not in header]
    if missing:
        raise ValueError(f"not the first line of `autofit bench record`: {', '.join(missing)} missing")
    try:
        hardware, stack = checked(Hardware, header, "hardware"), checked(Stack, header, "stack")
        workload, limit = checked(Workload, header, "workload"), checked(int, header, "memory_limit_bytes")
    except (ValueError, AutofitError) as error:
        raise ValueError(f"not a header that this version reads: {error}") from error
    if not 0 < limit <= hardware.memory_bytes:
        most = hardware.memory_bytes
        raise ValueError(f"memory_limit_bytes is {limit}, and must be above 0 and at most the device's {most}")
    try:
        probe = None if header.get("probe") is None else Probe.from_json(header["probe"])
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a probe that this version reads: {error}") from error
    return RecordedTable(
        file=file,
        header=header,
        hardware=hardware,
        stack=stack,
        workload=workload,
        memory_limit_bytes=limit,
        probe=probe,
    )


def is_table(file: Path) -> bool:
    """Whether the file begins like a recorded table, of whatever schema."""
    try:
        with file.open(encoding="utf-8") as lines:
            header = json.loads(lines.readline())
    except (OSError, ValueError):
        return False
    return isinstance(header, dict) and "space" in header and "workload" in header


def line_of(config: Config, attempt: Attempt) -> dict[str, Any]:
    line = {"config": config.to_json(), **attempt.outcome.to_json(), "seconds": attempt.seconds}
    return line if attempt.device_state is None else {**line, "device_state": attempt.device_state.to_json()}


def append(file: Path, line: dict[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(line, allow_nan=False) + "\n")


def drop_torn_line(file: Path) -> None:
    data = file.read_bytes()
    if not data.endswith(b"\n"):
        os.truncate(file, data.rfind(b"\n") + 1)


def wrong(file: Path, number: int, reason: str) -> UsageError:
    """The error that names a row, counted from 1 at the header."""
    return UsageError(f"{file}, row {number}: {reason}")


def _lines(file: Path, *, whole: bool) -> list[str]:
    """The lines that end."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    if not text.strip():
        raise UsageError(f"{file} is empty: `autofit bench record --out {file}` writes a table")
    lines = text.splitlines(keepends=True)
    if lines[-1].endswith("\n"):
        return lines
    if whole:
        raise wrong(file, len(lines), "cut off: the same `autofit bench record` resumes from there")
    return lines[: max(1, len(lines) - 1)]


def _trial(table: RecordedTable, line: dict[str, Any]) -> Trial:
    """The trial of a row. Raises `ValueError` or `UsageError` for what is none, or for figures that none can have."""
    if "schema" in line:
        raise ValueError("the header of another recording: a file can hold only one")
    config = config_of(line)
    if complete(line["config"]) != config:
        raise ValueError("its config does not name every axis")
    batch = table.workload.batch_per_device
    if batch % config.number("micro_batch"):
        raise ValueError(f"micro_batch={config['micro_batch']} does not divide the {batch} sequences of a device")
    outcome = outcome_of({name: line[name] for name in line.keys() - ROW_FIELDS})
    if machinery_failed(outcome):
        raise ValueError("a failure of the machinery says nothing about its config")
    seconds = checked(float, line, "seconds")
    _check_above_zero("seconds", seconds)
    if isinstance(outcome, Fits):
        _check_measurement(outcome, table)
    return Trial(
        config=config,
        workload=table.workload,
        hardware=table.hardware,
        stack=table.stack,
        memory_limit_bytes=table.memory_limit_bytes,
        outcome=outcome,
        seconds=seconds,
        recorded_at=str(table.header.get("recorded_at", "")),
    )


def _check_measurement(outcome: Fits, table: RecordedTable) -> None:
    measured, limit = outcome.measurement, table.memory_limit_bytes
    median, tokens_per_second = measured.step_seconds.median, measured.tokens_per_second
    _check_above_zero("step_seconds.median", median)
    _check_above_zero("tokens_per_second", tokens_per_second)
    if not 0 <= measured.device_bytes <= limit:
        raise ValueError(
            f"device_bytes is {measured.device_bytes}: what fits has at least 0 and at most the limit of {limit}"
        )
    speed = table.workload.tokens_per_step / median
    if not math.isclose(speed, tokens_per_second, rel_tol=0.01):  # rounding explains no more
        raise ValueError(f"tokens_per_second is {tokens_per_second!r}, and its step_seconds.median makes it {speed!r}")
    if measured.stopped_early:
        raise ValueError("stopped_early is true, and every trial of a table runs to its end")


def _check_above_zero(name: str, figure: float) -> None:
    if not 0 < figure < math.inf:
        raise ValueError(f"{name} is {figure!r}, and must be above 0 and finite")
