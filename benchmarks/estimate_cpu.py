"""The estimator against recorded CPU trials: memory, and time after calibration on a few of them.

    python benchmarks/estimate_cpu.py [TABLE ...] [--store URL] [--calibrate-on 5] [--seeds 20] [--json FILE]

A TABLE is a file of `autofit bench record` or `autofit db export`; without one and without --store, every such file in
recorded/ of a processor with two cores (cpu-2c, cpu-zen5-2c). The latest full measurement of each config counts or, of
a table that was recorded in several passes, the mean of these; nothing is run.
Prints the predicted and the measured figures of every config, with its time calibrated on all trials but its own. Then,
for each workload of each table:

* memory: the median absolute error, and how often fit is misjudged: over all pairs of a config and a limit halfway
  between two neighbouring measured sizes, and over all trials at the limit that they ran under, out-of-memory trials
  included; the same errors with the shares of estimate/heap.py fitted to the other tables alone (leave one table out),
  so that no trial judges a figure that was fitted to it;
* the errors of memory and of tokens/s (calibrated on all others) by kind of config: compiled, with offload, and others;
* time, on the trials not used for calibration: Kendall's tau-a of tokens/s, and the median absolute error. The
  calibration trials are drawn at random, once per seed 0, 1, ...; compiled ones are never drawn. The median over the
  seeds is printed with the worst. Beside it are the tau of predictions that are each calibrated on all other configs
  but the compiled ones, and the tau that a second measurement of the same configs would have: each speed is drawn anew
  within its trial's interval, which no prediction can beat except by luck. A trial does not see what the machine did
  between trials, so there is more noise than that. Of a table in several passes, `between_passes` has the tau of one
  against another, and how far their sizes differ; `left_unexplained` is the standard deviation of the errors that
  remain when every value of every axis, and every pair of values, is given its own correction with hindsight, and the
  tau of predictions without any other error. The costs of operations show up in such corrections; what they leave is
  noise, or interactions of three or more axes.

Each table of at least 60 configs is then held to the targets (cpu_targets.py), which are printed beside what was
reached, with what they leave open: how near the trials came to their limit. Last come the
memory errors over all tables together, and the heap's shares fitted to all of them. Exits with 0 only if every such
table reaches every target. The predictions are of the same step as the trials only if these ran on the present versions
of the libraries. About half a second per config on one core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from cpu_targets import LEAST_CONFIGS, Target, beside_the_targets, held_to_targets, nearest_to_the_limit
from numpy.typing import NDArray

from autofit.catalog.models import load
from autofit.estimate.estimate import Estimate
from autofit.estimate.heap import SHARES, causes
from autofit.estimate.speed import calibrated, prior, seconds
from autofit.lattice import Config
from autofit.operations import read_table
from autofit.operations.pooling import pooled
from autofit.operations.recorded_tables import is_table
from autofit.outcome import Fits, Measurement, OutOfMemory, Trial
from autofit.search.replay.oracle import drawn_again
from autofit.store import Store, read_lines
from autofit.techniques import Job

RECORDED = sorted((Path(__file__).parent / "recorded").glob("cpu-*2c-*.jsonl"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One config, measured and predicted."""

    trial: Trial
    measured: Measurement
    predicted: Estimate
    causes: NDArray[np.float64]
    """The causes of the heap's part of its memory (estimate/heap.py)."""
    beside_bytes: int
    """Predicted memory without that part."""

    @property
    def shown(self) -> tuple[Any, float]:
        """What calibration learns from this config: predicted work, and measured median seconds of a step."""
        return self.predicted.work, self.measured.step_seconds.median

    @property
    def memory_error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted.device_bytes / self.measured.device_bytes - 1.0


def read(table: Path) -> list[Trial]:
    """The trials of a recorded table, or those of an export. Of several passes, each config has one trial with their
    geometric mean of its speed and their mean of its memory."""
    if is_table(table):
        passes = by_config(read_table(table))
        return [_of_mean_memory(trial, passes[config]) for config, trial in pooled(passes).items()]
    with table.open(encoding="utf-8") as lines:
        return list(read_lines(lines))


def _of_mean_memory(trial: Trial, passes: Sequence[Trial]) -> Trial:
    sizes = [t.outcome.measurement.device_bytes for t in passes if isinstance(t.outcome, Fits)]
    if len(sizes) < 2 or not isinstance(trial.outcome, Fits):
        return trial
    measured = replace(trial.outcome.measurement, device_bytes=int(statistics.fmean(sizes)))
    return replace(trial, outcome=Fits(measurement=measured))


def by_config(trials: Iterable[Trial]) -> dict[Config, list[Trial]]:
    """The trials of each config, in their order."""
    found: dict[Config, list[Trial]] = defaultdict(list)
    for trial in trials:
        found[trial.config].append(trial)
    return found


def between_passes(table: Path) -> dict[str, float] | None:
    """How well two passes of a recorded table agree on the configs that fit in both, in the median over all pairs of
    passes: Kendall's tau of their speeds, and the median and the largest relative difference in memory. None for a
    single pass, and for an export."""
    passes = list(by_config(read_table(table)).values()) if is_table(table) else []
    found = []
    for one, other in itertools.combinations(range(max(map(len, passes), default=0)), 2):
        pairs = [(p[one].outcome, p[other].outcome) for p in passes if len(p) > other]
        both = [(a.measurement, b.measurement) for a, b in pairs if isinstance(a, Fits) and isinstance(b, Fits)]
        if len(both) > 1:
            sizes = [abs(b.device_bytes / a.device_bytes - 1.0) for a, b in both]
            tau = kendall([a.tokens_per_second for a, _ in both], [b.tokens_per_second for _, b in both])
            found.append((tau, statistics.median(sizes), max(sizes)))
    if not found:
        return None
    tau, median, most = map(statistics.median, zip(*found, strict=True))
    return {"kendall_tau": tau, "memory_median": median, "memory_most": most}


def latest(trials: Iterable[Trial]) -> list[list[Trial]]:
    """For each hardware, stack and workload, one trial per config: the last that fits, if possible one that was not
    stopped early; where none fits, the last that ran out of memory."""
    found: dict[tuple[str, str, str], dict[Any, Trial]] = defaultdict(dict)
    told = [t for t in trials if isinstance(t.outcome, (Fits, OutOfMemory))]
    # later trials replace earlier ones
    for trial in sorted(told, key=lambda t: (isinstance(t.outcome, Fits), not _stopped_early(t))):
        found[trial.hardware.key, trial.stack.key, trial.workload.key][trial.config] = trial
    return [list(known.values()) for known in found.values()]


def _stopped_early(trial: Trial) -> bool:
    return isinstance(trial.outcome, Fits) and trial.outcome.measurement.stopped_early


def compared(trials: Sequence[Trial]) -> tuple[list[Row], float]:
    """The trials of one workload that fit, each with its prediction (uncalibrated); and the share of all trials whose
    fit under their own limit is predicted wrongly."""
    from autofit.estimate.estimator import Estimator

    first = trials[0]
    job = Job(model=load(first.workload.model), workload=first.workload, hardware=first.hardware, stack=first.stack)
    estimator = Estimator(job, None)
    rows, wrong = [], []
    for trial in trials:
        found = estimator.estimate(trial.config, memory_limit_bytes=trial.memory_limit_bytes)
        if found.work is None:
            continue
        wrong.append(found.fits != isinstance(trial.outcome, Fits))
        if isinstance(trial.outcome, Fits):
            known = causes(estimator.trace(trial.config).timeline, estimator.traits(trial.config))
            beside = found.device_bytes - int(SHARES @ known)
            measured = trial.outcome.measurement
            rows.append(Row(trial=trial, measured=measured, predicted=found, causes=known, beside_bytes=beside))
    return rows, statistics.mean(wrong) if wrong else 0.0


def speeds(rows: Sequence[Row], learnt_from: Sequence[Row]) -> list[float]:
    """Predicted tokens/s of `rows` after calibration on `learnt_from`."""
    guess = prior(rows[0].trial.hardware)
    assert guess is not None, "a processor always has one"
    rates = calibrated(guess, [row.shown for row in learnt_from])
    tokens = rows[0].trial.workload.tokens_per_step
    return [tokens / seconds(row.shown[0], rates) for row in rows]


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's tau-a: concordant minus discordant pairs, over all pairs."""
    signs = [
        (a > b) - (a < b) if c > d else (b > a) - (b < a) if c < d else 0
        for (a, c), (b, d) in itertools.combinations(list(zip(one, other, strict=True)), 2)
    ]
    return sum(signs) / len(signs)


def misjudged(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Share of (config, limit) pairs whose fit is predicted wrongly; limits are halfway between neighbouring sizes."""
    limits = [(a + b) / 2 for a, b in itertools.pairwise(sorted(set(measured)))]
    wrong = [(p <= limit) != (m <= limit) for p, m in zip(predicted, measured, strict=True) for limit in limits]
    return statistics.mean(wrong) if wrong else 0.0


def heap(rows: Sequence[Row]) -> NDArray[np.float64]:
    """`SHARES` fitted to these trials by least absolute relative errors, so that a few outliers do not move them.

    By iteratively reweighted least squares (Schlossmacher 1973).
    """
    measured = np.array([row.measured.device_bytes for row in rows], dtype=float)
    left = np.array([row.causes for row in rows]) / measured[:, None]
    right = 1.0 - np.array([row.beside_bytes for row in rows]) / measured
    weights = np.ones(len(rows))
    for _ in range(30):
        found = np.linalg.lstsq(left * weights[:, None], right * weights, rcond=None)[0]
        weights = 1.0 / np.sqrt(np.maximum(np.abs(left @ found - right), 0.01))
    return np.asarray(found)


def memory_errors(rows: Sequence[Row], shares: NDArray[np.float64]) -> dict[str, float]:
    """Memory errors of predictions with these shares of the heap."""
    predicted = [row.beside_bytes + float(shares @ row.causes) for row in rows]
    measured = [row.measured.device_bytes for row in rows]
    errors = [p / m - 1.0 for p, m in zip(predicted, measured, strict=True)]
    return {
        "median_absolute_error": statistics.median(map(abs, errors)),
        "median_error": statistics.median(errors),
        "worst_error": max(errors, key=abs),
        "fit_misjudged": misjudged(predicted, measured),
    }


def repeated(rows: Sequence[Row], seeds: int) -> float:
    """Kendall's tau between the measured speeds and speeds drawn within the trials' intervals, as a replay draws them;
    the median over the seeds."""
    measured = [row.measured.tokens_per_second for row in rows]
    taus = []
    for seed in range(seeds):
        draw = random.Random(seed)
        again = [drawn_again(row.trial.outcome, draw) for row in rows]
        speeds_again = [one.measurement.tokens_per_second for one in again if isinstance(one, Fits)]
        taus.append(kendall(speeds_again, measured))
    return statistics.median(taus)


def left_unexplained(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Standard deviation of log speeds that the axes do not explain, per degree of freedom, and the tau it leaves.

    By least squares on the errors of predictions calibrated on all rows, over indicators of the values of each axis and
    of every pair of axes; of the axes alone where pairs would leave fewer degrees of freedom than a quarter of the
    rows, and None where these would too.
    """
    measured = np.log([row.measured.tokens_per_second for row in rows])
    predicted = np.log(speeds(rows, rows))
    for together in (2, 1):
        known = _indicators([row.trial.config.to_json() for row in rows], together)
        freedom = len(rows) - int(np.linalg.matrix_rank(known))
        if freedom >= len(rows) / 4:
            break
    else:
        return None
    errors = measured - predicted
    left = errors - known @ np.linalg.lstsq(known, errors, rcond=None)[0]
    deviation = float(np.sqrt(left @ left / freedom))
    draws = np.random.default_rng(0).normal(0.0, deviation, (20, len(rows)))
    taus = [kendall(predicted.tolist(), (predicted + draw).tolist()) for draw in draws]
    return {"axes_together": together, "deviation": deviation, "kendall_tau": statistics.median(taus)}


def _indicators(configs: Sequence[dict[str, Any]], together: int) -> NDArray[np.float64]:
    """[configs, combinations]: 1 where a config has a combination of values of `together` axes, else 0."""
    axes = sorted({axis for config in configs for axis in config})
    columns = []
    for some in itertools.combinations(axes, together):
        values = [tuple(config.get(axis) for axis in some) for config in configs]
        columns += [[float(value == one) for value in values] for one in dict.fromkeys(values)]
    return np.array(columns).T


def judged(rows: Sequence[Row], others: Sequence[Row], count: int, seeds: int) -> dict[str, Any]:
    """The figures of one workload of a table; `others` are the rows of the other tables."""
    eager = [row for row in rows if row.trial.config.get("compile") is not True]
    taus, errors = [], []
    for seed in range(seeds):
        learnt_from = random.Random(seed).sample(eager, count)
        rest = [row for row in rows if all(row is not learnt for learnt in learnt_from)]
        predicted = speeds(rest, learnt_from)
        measured = [row.measured.tokens_per_second for row in rest]
        taus.append(kendall(predicted, measured))
        errors.append(statistics.median(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)))
    measured = [row.measured.tokens_per_second for row in rows]
    return {
        "configs": len(rows),
        "memory": {
            **memory_errors(rows, SHARES),
            "heap_fitted_to_other_tables": memory_errors(rows, heap(others)) if others else None,
        },
        "time": {
            "calibrated_on": count,
            "seeds": seeds,
            "kendall_tau": {"median": statistics.median(taus), "worst": min(taus)},
            "tokens_per_second_error": {"median": statistics.median(errors), "worst": max(errors)},
            "kendall_tau_of_a_second_measurement": repeated(rows, seeds),
            "left_unexplained": left_unexplained(eager),
            "kendall_tau_uncalibrated": kendall(speeds(rows, []), measured),
        },
    }


def listed(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every config with its measured and predicted figures, its time calibrated on all others."""
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


def by_kind(configs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Errors of the configs of `listed` that are compiled, of those with offload, and of all others."""
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for found in configs:
        offload, compiled = found["config"].get("offload", "none"), found["config"].get("compile")
        kinds["compiled" if compiled else "offload" if offload != "none" else "other"].append(found)
    return {
        kind: {"configs": len(some), **{name: _errors(name, some) for name in ("device_bytes", "tokens_per_second")}}
        for kind, some in kinds.items()
    }


def _errors(name: str, configs: Sequence[dict[str, Any]]) -> dict[str, float]:
    errors = [found[name]["predicted"] / found[name]["measured"] - 1.0 for found in configs]
    return {
        "median_absolute": statistics.median(map(abs, errors)),
        "median": statistics.median(errors),
        "least": min(errors),
        "most": max(errors),
    }


def text(found: dict[str, Any]) -> str:
    """One config on one line."""
    memory, speed = found["device_bytes"], found["tokens_per_second"]
    config = ",".join(f"{k}={v}" for k, v in found["config"].items() if k not in ("offload", "sharding"))
    return (
        f"{memory['measured'] / 2**20:7.0f} {memory['predicted'] / 2**20:7.0f} MiB "
        f"{memory['predicted'] / memory['measured'] - 1:+6.1%}   {speed['measured']:7.1f} {speed['predicted']:7.1f} "
        f"tokens/s {speed['predicted'] / speed['measured'] - 1:+6.1%}   {config}"
    )


def table_text(configs: Sequence[dict[str, Any]], figures: dict[str, Any], targets: Sequence[Target]) -> str:
    """The configs of `listed`, the figures of merit, and these beside their targets."""
    against = "\n".join(map(str, targets)) or f"not judged: fewer than {LEAST_CONFIGS} configs"
    return "\n".join([*map(text, configs), json.dumps(figures, indent=2), *beside_the_targets(figures), against])


def main() -> int:
    """Print the figures of every workload that has enough configs to calibrate and compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", type=Path, metavar="TABLE")
    parser.add_argument("--store")
    parser.add_argument("--calibrate-on", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    files = {table.name: table for table in asked.tables or ([] if asked.store else RECORDED)}
    tables = {name: read(file) for name, file in files.items()}
    if asked.store:
        with Store.open(asked.store, create=False) as store:
            tables[asked.store] = list(store.stream())
    least = asked.calibrate_on + 2
    groups = [
        (name, group)
        for name, trials in tables.items()
        for group in latest(trials)
        if group[0].hardware.kind == "cpu" and len(group) > least
    ]
    found = [(name, group[0], *compared(group)) for name, group in groups]
    documents, shown = [], []
    missed = 0
    for (name, first, rows, wrong), (_, group) in zip(found, groups, strict=True):
        if len(rows) <= least:
            continue
        others = [row for other, _, known, _ in found if other != name for row in known]
        figures = judged(rows, others, asked.calibrate_on, asked.seeds)
        figures["memory"]["fit_misjudged_at_the_limit"] = wrong
        figures["memory"]["nearest_to_the_limit"] = nearest_to_the_limit(group)
        figures["between_passes"] = between_passes(files[name]) if name in files else None
        configs = listed(rows)
        shown += configs
        figures["errors_by_kind"] = by_kind(configs)
        figures["time"]["kendall_tau_calibrated_on_the_others"] = kendall(
            *([c["tokens_per_second"][of] for c in configs] for of in ("predicted", "measured"))
        )
        targets = held_to_targets(figures)
        print(f"{name}: {first.workload.model} on {first.hardware.name}: measured, predicted, error")
        print(table_text(configs, figures, targets))
        missed += sum(not target.reached for target in targets)
        about = {part: getattr(first, part).to_json() for part in ("hardware", "stack", "workload")}
        documents.append({"table": name, **about, **figures, "targets": [asdict(target) for target in targets]})
    if not documents:
        parser.error(f"no workload has more than {least} configs that were measured on a CPU")
    every = [row for _, _, rows, _ in found for row in rows]
    together = {
        "configs": len(every),
        "memory": memory_errors(every, SHARES),
        "errors_by_kind": by_kind(shown),
        "heap_fitted_to_all": [float(share) for share in heap(every)],
    }
    print(f"all tables: {json.dumps(together)}")
    if asked.json:
        document = {"recorded_at": datetime.now(UTC).isoformat(), "all_tables": together, "tables": documents}
        asked.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
