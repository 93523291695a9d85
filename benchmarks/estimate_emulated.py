"""The estimator held to emulated cards: what is allocated, what is reserved, and what fits.

    python benchmarks/estimate_emulated.py FOLDER [--processes 2]

Predicts anew what draw_emulated.py has trained, and trains nothing. FOLDER's files may be compressed (gzip). Writes the
figures beside them (`figures.json`), as recorded and as found now, which are the tables of README.md. Prints the
figures beside their targets, and the configs that are farthest off. Exits with 0 only if every target is reached.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.lattice import Config, Value
from autofit.estimate.estimator import Estimator
from autofit.estimate.version import ESTIMATOR_VERSION
from autofit.planning.requests import WorkloadOptions

SIZES = ("peak_allocated_bytes", "peak_reserved_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One config, predicted and trained."""

    card: str
    job: dict[str, Any]
    """Model, sequence length, global batch, ranks, and whether there were expandable segments."""
    config: dict[str, Value]
    limit: int
    predicted: dict[str, Any]
    outcome: str
    reason: str | None
    measured: dict[str, Any] | None

    def error(self, size: str) -> float | None:
        """Predicted over measured, minus one."""
        return None if self.measured is None else self.predicted[size] / self.measured[size] - 1.0

    @property
    def phase_errors(self) -> list[float]:
        """How far off what is allocated is in each phase that was measured. Without expandable segments blocks are
        larger than what is asked for, which a prediction says of the whole step only."""
        measured = self.measured["phases"] if self.measured and self.job["segments"] else {}
        return [abs(self.predicted["phases"][phase] / size - 1.0) for phase, size in measured.items()]

    @property
    def farthest(self) -> float:
        """How far off it is, for an order: an error of what is allocated counts tenfold, as its target is a tenth."""
        return max(weight * abs(self.error(size) or 0.0) for weight, size in zip((10.0, 1.0), SIZES, strict=True))

    @property
    def judged(self) -> bool:
        """Whether it fitted, or ran out of memory on the device: what else became of it says nothing of memory."""
        return self.outcome in ("fits", "out_of_memory")

    @property
    def misjudged(self) -> bool:
        """Whether it fitted unforeseen, or ran out of memory unforeseen."""
        return self.judged and self.predicted["fits"] != (self.outcome == "fits")


def sizes_of(found: Any) -> dict[str, Any]:
    """What an estimate says of memory, or what a measurement shows."""
    return {size: getattr(found, size) for size in (*SIZES, "device_bytes")} | {"phases": dict(found.phase_peaks)}


def read(file: Path) -> list[dict[str, Any]]:
    """The lines of a file, compressed or not, of which the first says where it was made; a last one that was cut off is
    left out."""
    found = []
    for line in (gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()).splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def rows_of(*files: Path) -> list[Row]:
    """The rows of files, each of one card."""
    lines = [(file.name.partition(".")[0], line) for file in files for line in read(file)[1:]]
    return [Row(card=card, **{k: v for k, v in line.items() if k != "group"}) for card, line in lines]


def again(site: tuple[Hardware, Stack], rows: Sequence[Row]) -> list[Row]:
    """Rows of one job, predicted anew."""
    asked = {name: value for name, value in rows[0].job.items() if name not in ("ranks", "segments")}
    job = WorkloadOptions.of(**asked, devices=rows[0].job["ranks"]).job(site)
    estimator = Estimator(replace(job, expandable_segments=rows[0].job["segments"]), None)
    found = []
    for row in rows:
        said = estimator.estimate(Config.from_json(row.config), memory_limit_bytes=row.limit)
        found.append(replace(row, predicted=sizes_of(said) | {"fits": said.fits}))
    return found


def all_again(files: Sequence[Path], processes: int) -> list[Row]:
    """The rows of all files, predicted anew; one estimator predicts all that train the same."""
    tasks = []
    for file in files:
        about, jobs = read(file)[0], defaultdict(list)
        for row in rows_of(file):
            jobs[json.dumps(row.job)].append(row)
        site = Hardware.from_json(about["hardware"]), Stack.from_json(about["stack"])
        tasks += [(site, rows) for rows in jobs.values()]
    found: list[Row] = []
    with ProcessPoolExecutor(processes) as pool:
        for number, rows in enumerate(pool.map(again, *zip(*tasks, strict=True)), 1):
            found += rows
            print(f"{number} of {len(tasks)} jobs", file=sys.stderr, flush=True)
    return found


def figures(rows: Sequence[Row]) -> list[tuple[str, float, float]]:
    """Each figure's name, value and target, the most that it may be."""
    errors = ([abs(error) for row in rows if (error := row.error(size)) is not None] or [0.0] for size in SIZES)
    allocated, reserved = map(sorted, errors)
    phases = sorted(error for row in rows for error in row.phase_errors) or [0.0]
    fixed = sorted(abs(row.error(SIZES[1]) or 0.0) for row in rows if not row.job["segments"]) or [0.0]
    judged = [row.misjudged for row in rows if row.judged]
    margins = (abs(row.predicted["device_bytes"] / row.limit - 1.0) for row in rows if row.misjudged)
    return [
        ("allocated, median error", statistics.median(allocated), 0.0005),
        ("allocated, largest error", allocated[-1], 0.005),
        ("each phase with expandable segments, median error", statistics.median(phases), 0.0005),
        ("each phase with expandable segments, largest error", phases[-1], 0.005),
        ("reserved, median error", statistics.median(reserved), 0.005),
        ("reserved, 95th percentile", _late(reserved), 0.02),
        ("reserved without expandable segments, 95th percentile", _late(fixed), 0.02),
        ("fit misjudged", statistics.fmean(judged or [0.0]), 0.003),
        ("margin of what was misjudged", max(margins, default=0.0), 0.01),
        ("ended in another way", 1.0 - len(judged) / len(rows), 0.0),
    ]


def _late(errors: Sequence[float]) -> float:
    """The 95th percentile of sorted numbers."""
    return errors[int(0.95 * len(errors))]


def compared(recorded: Sequence[Row], now: Sequence[Row]) -> dict[str, Any]:
    """What `figures.json` holds: the figures as they were when the rows were recorded, and of this estimator."""
    both = zip(figures(recorded), figures(now), strict=True)
    return {
        "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "estimator": ESTIMATOR_VERSION,
        "configs": len(now),
        "trained": sum(row.measured is not None for row in now),
        "figures": {name: {"target": most, "recorded": old, "now": new} for (name, old, most), (_, new, _) in both},
    }


def table_of(found: Mapping[str, Any]) -> str:
    """The table of README.md that `compared` makes."""

    def said(value: float, most: float) -> str:
        return f"{float(f'{100 * value:.2g}'):g} %" + (", **missed**" if value > most else "")

    lines = [f"| figure | target | as recorded | estimator {found['estimator']} |", "|---|---|---|---|"]
    for name, one in found["figures"].items():
        target = one["target"]
        lines.append(f"| {name} | {100 * target:g} % | {said(one['recorded'], target)} | {said(one['now'], target)} |")
    return "\n".join(lines) + "\n"


def judge(rows: Sequence[Row], found: Mapping[str, Any]) -> bool:
    """Print the figures of these rows and what is farthest off; returns whether every target is reached."""
    print(f"{found['configs']} configs, of which {found['trained']} trained\n{table_of(found)}")
    print("what ended otherwise, was misjudged, or is farthest off:")
    for row in sorted(rows, key=lambda row: (not row.judged, row.misjudged, row.farthest), reverse=True)[:20]:
        print(json.dumps(asdict(row) | {size: row.error(size) for size in SIZES}))
    return all(one["now"] <= one["target"] for one in found["figures"].values())


def main() -> int:
    """Predict anew, write, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    files = sorted(asked.folder.glob("*.jsonl*"))
    now = all_again(files, asked.processes)
    found = compared(rows_of(*files), now)
    (asked.folder / "figures.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0 if judge(now, found) else 1


if __name__ == "__main__":
    sys.exit(main())
