"""The figures of merit of the estimator on recorded trials of a processor: errors of memory, of speed and of ranks."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cpu_rows import Row, by_config
from numpy.typing import NDArray

from autofit.bench.oracle import drawn_again
from autofit.estimate.heap import SHARES
from autofit.estimate.speed import calibrated, prior, seconds
from autofit.operations import read_table
from autofit.operations.recorded_tables import is_table
from autofit.outcome import Fits


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
