"""Whether a recorded table may be replayed under limits below its own: some configs, measured again under real ones.

    python benchmarks/smaller_limits.py TABLE FILE [--limits 24GiB,40GiB] [--time-budget SECONDS]

A replay takes the size that a config had without the limit. For what fits, that is exact: PyTorch's allocator looks at
a limit only when it asks the driver for more memory, so a step that never reaches the limit runs as it did without one.
What exceeds the limit may still train under it, because the allocator then frees what it has cached and tries again,
which takes time. A replay counts that as out of memory, and is too careful.

For each limit below the table's, this measures under the real limit what a replay could get wrong: the fastest and the
heaviest configs that fit it by the table, the one that took most while it was built, and those that exceed the limit by
no more than what the allocator had cached, the lightest first. Trials are written to FILE as they end, as in an
export, and a further call goes on; none begins after the time budget.

Exits with 1 if a config that fits a limit by the table does not, with 75 if trials are left, and with 4 on hardware or
libraries that are not the table's; else with 0.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from measured_again import measured

from autofit.bench.recorded import under
from autofit.errors import AutofitError, EnvironmentLacks
from autofit.operations.recorded_tables import RecordedTable, read_whole
from autofit.operations.recording import drop_torn_line
from autofit.outcome import Fits, Trial
from autofit.store.exchange import line_of, opening_line, read_lines
from autofit.units import format_bytes, parse_bytes
from autofit.workers.in_place import InPlacePool

FITTING, DISPUTED = 3, 4
"""For each limit, how many of the heaviest configs that fit it are measured, and of those that just exceed it."""
UNFINISHED = 75
"""The exit status if trials are left: EX_TEMPFAIL of sysexits.h."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A config of the table, and a limit under which it is measured."""

    recorded: Trial
    limit: int

    @property
    def fits(self) -> bool:
        """Whether a replay says that it fits."""
        return isinstance(under(self.limit, self.recorded.outcome), Fits)

    def is_of(self, trial: Trial) -> bool:
        """Whether the trial is its measurement."""
        asked = self.recorded.config, self.recorded.workload.key, self.recorded.stack.key, self.limit
        return (trial.config, trial.workload.key, trial.stack.key, trial.memory_limit_bytes) == asked


def cases(trials: Sequence[Trial], limit: int) -> list[Case]:
    """What a replay under `limit` could get wrong."""
    measured = [(trial, trial.outcome.measurement) for trial in trials if isinstance(trial.outcome, Fits)]
    fitting = [(trial, m) for trial, m in measured if m.device_bytes <= limit]
    disputed = [
        (trial, m)
        for trial, m in measured
        if limit < m.device_bytes and m.device_bytes - m.peak_reserved_bytes + m.peak_allocated_bytes <= limit
    ]
    fastest = sorted(fitting, key=lambda pair: -pair[1].tokens_per_second)[:1]
    heaviest = sorted(fitting, key=lambda pair: -pair[1].device_bytes)[:FITTING]
    built = sorted(fitting, key=lambda pair: -pair[1].setup_peak_bytes)[:1]  # the limit holds while it is built, too
    nearest = sorted(disputed, key=lambda pair: pair[1].device_bytes)[:DISPUTED]
    chosen = dict.fromkeys(trial.config for trial, _ in (*fastest, *heaviest, *built, *nearest))
    known = {trial.config: trial for trial in trials}
    return [Case(recorded=known[config], limit=limit) for config in chosen]


def text(case: Case, trial: Trial) -> str:
    """One case on one line."""
    config = ",".join(f"{axis}={value}" for axis, value in trial.config.to_json().items())
    said = f"{format_bytes(case.limit)}: by the table {'fits' if case.fits else 'exceeds it'}, {_size(case.recorded)}"
    ended = trial.outcome.kind.replace("_", " ")
    if isinstance(trial.outcome, Fits) and isinstance(case.recorded.outcome, Fits):
        gained = trial.outcome.measurement.tokens_per_second / case.recorded.outcome.measurement.tokens_per_second - 1
        ended += f", {_size(trial)}, speed {gained:+.1%}"
    return f"{said}; under it {ended}   {config}"


def _size(trial: Trial) -> str:
    return format_bytes(trial.outcome.measurement.device_bytes) if isinstance(trial.outcome, Fits) else "no size"


def verdict(pairs: Sequence[tuple[Case, Trial]]) -> tuple[str, bool]:
    """What the measurements say in words, and whether replays under the limits are right about what fits."""
    fitting = [isinstance(trial.outcome, Fits) for case, trial in pairs if case.fits]
    disputed = [isinstance(trial.outcome, Fits) for case, trial in pairs if not case.fits]
    words = (
        f"{sum(fitting)} of {len(fitting)} configs fit that fit by the table; of {len(disputed)} that exceed a limit "
        f"only by what the allocator had cached, {sum(disputed)} train all the same"
    )
    return words, all(fitting)


def main() -> int:
    """Measure what is left, then compare; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, metavar="TABLE")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--limits", default="24GiB,40GiB")
    parser.add_argument("--time-budget", type=float, default=math.inf, metavar="SECONDS")
    asked = parser.parse_args()
    ends = time.monotonic() + asked.time_budget
    try:
        table = read_whole(asked.table)
        limits = [limit for limit in map(parse_bytes, asked.limits.split(",")) if limit < table.memory_limit_bytes]
        wanted = [case for limit in limits for case in cases(table.trials, limit)]
        known = _read(asked.file)
        left = [case for case in wanted if not any(map(case.is_of, known))]
        known += _run(table, left, asked.file, ends)
    except AutofitError as error:
        print(f"smaller_limits: {error}", file=sys.stderr)
        return error.exit_code
    pairs = [(case, trial) for case in wanted for trial in known if case.is_of(trial)]
    print("\n".join(text(case, trial) for case, trial in pairs))
    words, right = verdict(pairs)
    print(f"{asked.table.name}: {words}")
    return 1 if not right else UNFINISHED if len(pairs) < len(wanted) else 0


def _run(table: RecordedTable, left: Sequence[Case], file: Path, ends: float) -> list[Trial]:
    """Measure the cases until the time is over; each trial is written as it ends."""
    if not left or time.monotonic() >= ends:
        return []
    found = []
    pool = InPlacePool(device=table.hardware.kind)
    try:
        hardware, stack = pool.site()
        if (hardware.key, stack.key) != (table.hardware.key, table.stack.key):
            raise EnvironmentLacks(
                f"the table is of {table.hardware.name} and {table.stack}, this machine has {hardware.name} and "
                f"{stack}",
                remedy="measure where the table was recorded, in the same environment",
            )
        for case in left:
            if time.monotonic() >= ends:
                break
            trial = measured(pool, case.recorded, case.limit)
            if trial is not None:
                _write(file, trial)
                found.append(trial)
    finally:
        pool.close()
    return found


def _read(file: Path) -> list[Trial]:
    """The trials of earlier calls; a line that was not finished is removed."""
    if not file.exists() or not file.stat().st_size:
        return []
    drop_torn_line(file)
    with file.open(encoding="utf-8") as lines:
        return list(read_lines(lines))


def _write(file: Path, trial: Trial) -> None:
    with file.open("a", encoding="utf-8") as lines:
        if lines.tell() == 0:
            lines.write(opening_line())
        lines.write(line_of(trial))


if __name__ == "__main__":
    sys.exit(main())
