"""Recorded tables: a file with a header, and a row for every trial. Read strictly: errors name the row."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.device.probe import Probe
from autofit.core.errors import AutofitError, UsageError
from autofit.core.lattice import Config
from autofit.core.outcome import Fits, Outcome, Trial, machinery_failed, outcome_from_json
from autofit.core.workload import Workload
from autofit.operations.recording.pooling import pooled
from autofit.techniques import complete

SCHEMA = 1
"""Format version of a recorded table, given in its first line."""
SAME = ("hardware", "stack", "workload", "space", "memory_limit_bytes")
"""The header fields that must agree for a recording to be continued; of the hardware, its key must."""
BESIDE_OUTCOME = ("config", "pass", "seconds", "device_state")
"""A row's fields besides its trial's outcome; `pass` is absent in the first pass, `device_state` where it was not
observed."""


class Row(NamedTuple):
    """A recorded trial."""

    number: int
    """The pass, from 1 on."""
    config: Config
    outcome: Outcome
    seconds: float


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
    rows: tuple[Row, ...] = ()
    probe: Probe | None = None
    """What a probe of the device showed before the first trial; None where none was taken."""

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return self.file.stem

    @cached_property
    def trials(self) -> tuple[Trial, ...]:
        """One per config, however many passes were recorded."""
        return tuple(pooled(self.passes).values())

    @property
    def contradicting(self) -> list[Config]:
        """The configs that fitted in one pass but not in another; they count as not fitting."""
        fitted = {config: {isinstance(t.outcome, Fits) for t in passes} for config, passes in self.passes.items()}
        return [config for config, either in fitted.items() if len(either) > 1]

    @cached_property
    def passes(self) -> dict[Config, list[Trial]]:
        """The trials of each config."""
        found: dict[Config, list[Trial]] = defaultdict(list)
        for trial in self.of_all_passes():
            found[trial.config].append(trial)
        return found

    def of_all_passes(self) -> list[Trial]:
        """In the order in which they ran."""
        return [
            Trial(
                config=row.config,
                workload=self.workload,
                hardware=self.hardware,
                stack=self.stack,
                memory_limit_bytes=self.memory_limit_bytes,
                outcome=row.outcome,
                seconds=row.seconds,
                recorded_at=str(self.header.get("recorded_at", "")),
            )
            for row in self.rows
        ]


def read_table(file: Path, *, whole: bool = False) -> RecordedTable:
    """The table in `file`. Raises `UsageError`, naming the row, for anything that `autofit bench record` has not
    written, and for a config that is twice in one pass: nobody knows which of its outcomes is right.

    An unfinished last line, which a recording leaves if it is killed while writing, is left out. If the table is to be
    `whole`, it is refused, and so is one without a trial; but one that ends with a whole row may be an unfinished
    recording all the same, or one of `--max-trials`.
    """
    header, *rows = _objects(file, whole=whole)
    if header.get("schema") != SCHEMA:
        raise wrong(file, 1, f"schema {header.get('schema')!r}, and this version reads {SCHEMA}")
    missing = [name for name in SAME if name not in header]
    if missing:
        raise wrong(file, 1, f"not the first line of `autofit bench record`: {', '.join(missing)} missing")
    try:
        hardware, stack = Hardware.from_json(header["hardware"]), Stack.from_json(header["stack"])
        workload = Workload.from_json(header["workload"])
    except (AutofitError, TypeError, ValueError) as error:
        raise wrong(file, 1, f"not a header that this version reads: {error}") from error
    limit, most = header["memory_limit_bytes"], hardware.memory_bytes
    if type(limit) is not int or type(most) is not int or not 0 < limit <= most:
        raise wrong(file, 1, f"memory_limit_bytes is {limit!r}, and must be above 0 and at most the device's {most!r}")
    try:
        probe = None if header.get("probe") is None else Probe.from_json(header["probe"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise wrong(file, 1, f"not a probe that this version reads: {error}") from error
    found = RecordedTable(
        file=file,
        header=header,
        hardware=hardware,
        stack=stack,
        workload=workload,
        memory_limit_bytes=limit,
        probe=probe,
    )
    if whole and not rows:
        raise UsageError(f"{file} is empty: it has a header and no trial; `autofit bench record` resumes from there")
    return replace(found, rows=tuple(_checked(file, found, rows)))


def is_table(file: Path) -> bool:
    """Whether the file begins like a recorded table, of whatever schema."""
    try:
        with file.open(encoding="utf-8") as lines:
            header = json.loads(lines.readline())
    except (OSError, ValueError):
        return False
    return isinstance(header, dict) and "space" in header and "workload" in header


def append(file: Path, line: dict[str, Any]) -> None:
    """Write a header or a row."""
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(line, allow_nan=False) + "\n")


def drop_torn_line(file: Path) -> None:
    """Remove an unfinished last line."""
    data = file.read_bytes()
    if not data.endswith(b"\n"):
        os.truncate(file, data.rfind(b"\n") + 1)


def wrong(file: Path, number: int, reason: str) -> UsageError:
    """The error that names a row, counted from 1 at the header."""
    return UsageError(f"{file}, row {number}: {reason}")


def _objects(file: Path, *, whole: bool) -> list[dict[str, Any]]:
    """The lines as JSON objects, the header first."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    if not text:
        raise UsageError(f"{file} is empty: `autofit bench record --out {file}` writes a table")
    if whole and not text.endswith("\n"):
        raise wrong(file, len(text.splitlines()), "cut off: the same `autofit bench record` resumes from there")
    rows = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not line.endswith("\n") and number > 1:
            break
        try:
            row = json.loads(line, parse_constant=_no_number)
        except ValueError as error:
            raise wrong(file, number, f"not JSON: {error}") from error
        if not isinstance(row, dict):
            raise wrong(file, number, "not a JSON object")
        rows.append(row)
    return rows


def _checked(file: Path, table: RecordedTable, rows: list[dict[str, Any]]) -> Iterator[Row]:
    first: dict[tuple[int, Config], int] = {}
    for number, line in enumerate(rows, start=2):
        if "schema" in line:
            raise wrong(file, number, "the header of another recording: a file can hold only one")
        try:
            row = _row(line, table)
        except KeyError as error:
            raise wrong(file, number, f"{error.args[0]} is missing") from error
        except (AutofitError, AttributeError, OverflowError, TypeError, ValueError) as error:
            raise wrong(file, number, str(error)) from error
        earlier = first.setdefault((row.number, row.config), number)
        if earlier != number:
            raise wrong(file, number, f"repeats the config of row {earlier}: {row.config}")
        yield row


def _row(line: dict[str, Any], table: RecordedTable) -> Row:
    """Raises a `KeyError`, `TypeError` or `ValueError` for what is no trial, or for figures that no trial can have."""
    config = Config.from_json(line["config"])
    if complete(line["config"]) != config:
        raise ValueError("its config does not name every axis")
    batch = table.workload.batch_per_device
    if batch % config.number("micro_batch"):
        raise ValueError(f"micro_batch={config['micro_batch']} does not divide the {batch} sequences of a device")
    outcome = outcome_from_json({k: v for k, v in line.items() if k not in BESIDE_OUTCOME})
    if machinery_failed(outcome):
        raise ValueError("a failure of the machinery says nothing about its config")
    number, seconds = line.get("pass", 1), line["seconds"]
    if type(number) is not int or number < 1:
        raise ValueError(f"pass is {number!r}, and must be a whole number from 1 on")
    _check_above_zero("seconds", seconds)
    if isinstance(outcome, Fits):
        _check_measurement(outcome, table)
    return Row(number, config, outcome, float(seconds))


def _check_measurement(outcome: Fits, table: RecordedTable) -> None:
    measured, limit = outcome.measurement, table.memory_limit_bytes
    _check_above_zero("step_seconds.median", measured.step_seconds.median)
    _check_above_zero("tokens_per_second", measured.tokens_per_second)
    if not 0 <= measured.device_bytes <= limit:
        raise ValueError(
            f"device_bytes is {measured.device_bytes!r}: what fits has at least 0 and at most the limit of {limit}"
        )
    speed = table.workload.tokens_per_step / measured.step_seconds.median
    if not math.isclose(speed, measured.tokens_per_second, rel_tol=0.01):  # rounding explains no more
        said = measured.tokens_per_second
        raise ValueError(f"tokens_per_second is {said!r}, and its step_seconds.median makes it {speed!r}")
    if measured.stopped_early is not False:
        raise ValueError("stopped_early is true, and every trial of a table runs to its end")


def _check_above_zero(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}, and must be above 0")


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")
