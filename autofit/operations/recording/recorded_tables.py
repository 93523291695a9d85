"""Recorded tables as replays and comparisons read them: one trial per config."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from autofit.core.device.probe import Probe
from autofit.core.errors import UsageError
from autofit.core.hardware import Hardware, Stack
from autofit.core.lattice import Config
from autofit.core.outcome import Trial
from autofit.core.workload import Workload
from autofit.operations.recording.pooling import contradicting, pooled
from autofit.operations.recording.table_file import read, wrong


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


def read_table(file: Path) -> list[Trial]:
    """The trials of a recorded table, of all passes, in the order in which they ran. Raises `UsageError` for any other
    file."""
    return read(file).trials()


def read_whole(file: Path) -> RecordedTable:
    """The table in `file`, with its passes pooled. Raises `UsageError`, naming the row, for a table that is cut off,
    empty, of another schema or of several recordings, or that has a config twice in one pass or an impossible value.

    A table that ends with a whole row may be an unfinished recording, or one of `--max-trials`: it is read as it is."""
    found = read(file, whole=True)
    trials: dict[Config, list[Trial]] = defaultdict(list)
    for trial in found.trials():
        trials[trial.config].append(trial)
    if not trials:
        raise UsageError(f"{file} is empty: it has a header and no trial; `autofit bench record` resumes from there")
    probe = found.header.get("probe")
    try:
        return RecordedTable(
            file=file,
            hardware=found.hardware,
            stack=found.stack,
            workload=found.workload,
            memory_limit_bytes=found.memory_limit_bytes,
            trials=tuple(pooled(trials).values()),
            contradicting=tuple(contradicting(trials)),
            probe=None if probe is None else Probe.from_json(probe),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise wrong(file, 1, f"not a probe that this version reads: {error}") from error
