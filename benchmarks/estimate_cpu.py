"""The estimator against recorded trials of a processor: memory, and time after calibration on a few of them.

    python benchmarks/estimate_cpu.py [TABLE ...] [--store URL] [--calibrate-on 5] [--seeds 20] [--json FILE]

A TABLE is a file of `autofit bench record` or `autofit db export`; without one and without --store,
recorded/cpu-2c-every-axis.jsonl. The latest full measurement of every config counts; nothing is run. Prints every
config with what is predicted and what was measured, its time after calibration on all trials but its own. Then,
for each workload:

* memory: the median absolute error, and how often fit is misjudged, over all pairs of a config and a limit halfway
  between two neighbouring sizes that were measured; and what a fit to these trials would take for the three constants
  of estimate/memory.py that describe the C library's heap, with the error that each trial has when the others are
  fitted (leave one out);
* time, on the trials that it was not calibrated on: Kendall's tau-a of tokens/s, and the median absolute error. The
  trials for calibration are drawn at random, once per seed 0, 1, ...; compiled ones are never drawn. The median of all
  seeds is printed, with the worst.

The trials must have run on this version of the libraries for their predictions to be of the same step. About half a
second per config on one core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autofit.catalog.models import load
from autofit.estimate.estimate import Estimate
from autofit.estimate.memory import MAPPED_BYTES
from autofit.estimate.speed import calibrated, prior, seconds
from autofit.operations import read_table
from autofit.outcome import Fits, Measurement, Trial
from autofit.store import Store, read_lines
from autofit.techniques import Job

RECORDED = Path(__file__).parent / "recorded" / "cpu-2c-every-axis.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One config, measured and predicted."""

    trial: Trial
    measured: Measurement
    predicted: Estimate
    forward_bytes: tuple[int, int]
    """What the last forward frees, and what it saves."""

    @property
    def shown(self) -> tuple[Any, float]:
        """What calibration learns from it."""
        return self.predicted.work, self.measured.step_seconds.median

    @property
    def memory_error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted.device_bytes / self.measured.device_bytes - 1.0


def read(table: Path) -> list[Trial]:
    """The trials of a recorded table, or of an export."""
    with table.open(encoding="utf-8") as lines:
        if "space" in json.loads(lines.readline()):
            return read_table(table)
        lines.seek(0)
        return list(read_lines(lines))


def latest(trials: Iterable[Trial]) -> list[list[Trial]]:
    """For each hardware, stack and workload: of every config the last trial that fits, in full where it can be."""
    found: dict[tuple[str, str, str], dict[Any, Trial]] = defaultdict(dict)
    fits = [(t.outcome.measurement.stopped_early, t) for t in trials if isinstance(t.outcome, Fits)]
    for _, trial in sorted(fits, key=lambda pair: not pair[0]):  # what comes later takes the place of what came before
        if trial.hardware.kind == "cpu":
            found[trial.hardware.key, trial.stack.key, trial.workload.key][trial.config] = trial
    return [list(known.values()) for known in found.values()]


def compared(trials: Sequence[Trial]) -> list[Row]:
    """Each trial of one workload beside its prediction, without time."""
    from autofit.estimate.estimator import Estimator

    first = trials[0]
    job = Job(model=load(first.workload.model), workload=first.workload, hardware=first.hardware, stack=first.stack)
    estimator = Estimator(job, None)
    rows = []
    for trial in trials:
        assert isinstance(trial.outcome, Fits)
        found = estimator.estimate(trial.config, memory_limit_bytes=trial.memory_limit_bytes)
        if found.work is not None:
            forward_bytes = estimator.trace(trial.config).timeline.forward_bytes(MAPPED_BYTES)
            measured = trial.outcome.measurement
            rows.append(Row(trial=trial, measured=measured, predicted=found, forward_bytes=forward_bytes))
    return rows


def speeds(rows: Sequence[Row], learnt_from: Sequence[Row]) -> list[float]:
    """Predicted tokens/s of `rows` after calibration on others."""
    guess = prior(rows[0].trial.hardware)
    assert guess is not None, "a processor always has one"
    rates = calibrated(guess, [row.shown for row in learnt_from])
    tokens = rows[0].trial.workload.tokens_per_step
    return [tokens / seconds(row.shown[0], rates) for row in rows]


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's tau-a: concordant less discordant pairs, over all pairs."""
    signs = [
        (a > b) - (a < b) if c > d else (b > a) - (b < a) if c < d else 0
        for (a, c), (b, d) in itertools.combinations(list(zip(one, other, strict=True)), 2)
    ]
    return sum(signs) / len(signs)


def misjudged(rows: Sequence[Row]) -> float:
    """Share of (config, limit) whose fit is predicted wrongly; limits are halfway between neighbouring sizes."""
    sizes = sorted({row.measured.device_bytes for row in rows})
    limits = [(a + b) / 2 for a, b in itertools.pairwise(sizes)]
    wrong = [
        (row.predicted.device_bytes <= limit) != (row.measured.device_bytes <= limit)
        for row in rows
        for limit in limits
    ]
    return statistics.mean(wrong) if wrong else 0.0


def heap(rows: Sequence[Row]) -> dict[str, float]:
    """HEAP_BYTES, HEAP_OF_FREED and HEAP_OF_SAVED by least squares of relative errors over these trials."""
    known = np.array([[1.0, *row.forward_bytes] for row in rows])
    beside = [row.predicted.device_bytes - row.predicted.breakdown["fragmentation"] for row in rows]
    measured = np.array([row.measured.device_bytes for row in rows], dtype=float)
    left, right = known / measured[:, None], 1.0 - np.array(beside) / measured

    def fitted(chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
        return np.asarray(np.linalg.lstsq(left[chosen], right[chosen], rcond=None)[0])

    every = np.arange(len(rows))
    errors = [abs(float(left[i] @ fitted(every != i) - right[i])) for i in every]
    fixed, of_freed, of_saved = fitted(every >= 0)
    return {
        "bytes": float(fixed),
        "of_freed": float(of_freed),
        "of_saved": float(of_saved),
        "leave_one_out_median_error": statistics.median(errors),
        "leave_one_out_worst_error": max(errors),
    }


def judged(rows: Sequence[Row], count: int, seeds: int) -> dict[str, Any]:
    """The figures of one workload."""
    eager = [row for row in rows if row.trial.config.get("compile") is not True]
    taus, errors = [], []
    for seed in range(seeds):
        learnt_from = random.Random(seed).sample(eager, count)
        others = [row for row in rows if row not in learnt_from]
        predicted = speeds(others, learnt_from)
        measured = [row.measured.tokens_per_second for row in others]
        taus.append(kendall(predicted, measured))
        errors.append(statistics.median(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)))
    measured = [row.measured.tokens_per_second for row in rows]
    return {
        "configs": len(rows),
        "memory": {
            "median_absolute_error": statistics.median(abs(row.memory_error) for row in rows),
            "median_error": statistics.median(row.memory_error for row in rows),
            "worst_error": max((row.memory_error for row in rows), key=abs),
            "fit_misjudged": misjudged(rows),
            "heap_fitted_here": heap(rows),
        },
        "time": {
            "calibrated_on": count,
            "seeds": seeds,
            "kendall_tau": {"median": statistics.median(taus), "worst": min(taus)},
            "tokens_per_second_error": {"median": statistics.median(errors), "worst": max(errors)},
            "kendall_tau_uncalibrated": kendall(speeds(rows, []), measured),
        },
    }


def listed(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every config with both figures, its time calibrated on all others."""
    out = []
    for row in rows:
        others = [r for r in rows if r is not row and r.trial.config.get("compile") is not True]
        (speed,) = speeds([row], others)
        out.append(
            {
                "config": row.trial.config.to_json(),
                "device_bytes": {"measured": row.measured.device_bytes, "predicted": row.predicted.device_bytes},
                "tokens_per_second": {"measured": row.measured.tokens_per_second, "predicted": speed},
                "relative_spread": row.measured.step_seconds.relative_spread,
            }
        )
    return out


def text(found: dict[str, Any]) -> str:
    """One config in a line."""
    memory, speed = found["device_bytes"], found["tokens_per_second"]
    config = ",".join(f"{k}={v}" for k, v in found["config"].items() if k not in ("offload", "sharding"))
    return (
        f"{memory['measured'] / 2**20:7.0f} {memory['predicted'] / 2**20:7.0f} MiB "
        f"{memory['predicted'] / memory['measured'] - 1:+6.1%}   {speed['measured']:7.1f} {speed['predicted']:7.1f} "
        f"tokens/s {speed['predicted'] / speed['measured'] - 1:+6.1%}   {config}"
    )


def main() -> None:
    """Print the figures of every workload that has more configs than calibration takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", type=Path, metavar="TABLE")
    parser.add_argument("--store")
    parser.add_argument("--calibrate-on", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    trials: list[Trial] = []
    for table in asked.tables or ([] if asked.store else [RECORDED]):
        trials += read(table)
    if asked.store:
        with Store.open(asked.store, create=False) as store:
            trials += store.stream()
    documents = []
    for group in latest(trials):
        rows = compared(group) if len(group) > asked.calibrate_on + 2 else []
        if len(rows) <= asked.calibrate_on + 2:
            continue
        first, every = group[0], listed(rows)
        figures = judged(rows, asked.calibrate_on, asked.seeds)
        documents.append(
            {
                "hardware": first.hardware.to_json(),
                "stack": first.stack.to_json(),
                "workload": first.workload.to_json(),
                **figures,
                "listed": every,
            }
        )
        print(f"{first.workload.model} on {first.hardware.name}: measured, predicted, error")
        print("\n".join(map(text, every)))
        print(json.dumps(figures, indent=2))
    if asked.json:
        asked.json.write_text(json.dumps(documents, indent=2) + "\n", encoding="utf-8")
    if not documents:
        parser.error(f"no workload has more than {asked.calibrate_on + 2} configs that were measured on a processor")


if __name__ == "__main__":
    main()
