"""What many searches on made devices come to: figures of each device, of all together, and with a layer and without."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autofit.bench.cases import Row
from autofit.bench.made_search import BUDGET_SECONDS, OURS
from autofit.search.replay.score import Spread

ENOUGH = 10
"""Searches that must have stated a bound on a device before it is judged by itself."""
NEAR = "seconds_to_near"
MOST_OF_BUDGET = 0.1
"""Share of the time budget that no single trial should take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The searches of one kind. A search that failed has a regret of 1, and reached nothing."""

    name: str
    """The device; or what the searches have in common."""
    searches: int
    """Ours."""
    regret: Spread
    """Of the recommended config: by what share it is slower than the best."""
    bounds: int
    """How many of the searches stated a bound on it."""
    bounds_held: int
    seconds_to_near: Spread
    """Seconds of trials until one was within 5 % of the best."""
    seconds_to_near_of: Mapping[str, Spread]
    """The same of each of Optuna's samplers that ran."""
    over: Mapping[str, float | None]
    """By sampler: the median of our seconds over its own for the same case, where either came there; None where that is
    infinite, or where neither ever came there."""
    trials_to_best: Spread
    seconds_to_best: Spread
    """The same to within 1 %."""
    trials: float
    """Mean number of trials."""
    seconds: float
    """Mean seconds of all trials."""
    frontier: float
    """Mean share of the exhaustive frontier's hypervolume."""
    longest_seconds: float
    """Of the longest single trial."""
    greedy: int
    """Searches of which a single trial took more than a tenth of the command's time budget."""
    computing_seconds: float
    """Mean processor time of a search."""
    failed: int
    """Searches that raised an exception."""
    worst: str
    """The case with the largest regret, by the name that repeats it."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def by_device(rows: Iterable[Row]) -> list[Summary]:
    """One summary for each device that our search ran on, the worst first."""
    devices: dict[str, list[Row]] = {}
    for row in rows:
        devices.setdefault(row["device"], []).append(row)
    found = [summary(device, own) for device, own in devices.items()]
    return sorted(found, key=lambda s: (-(s.regret.p90 or 0.0), -(s.regret.median or 0.0), s.name))


def summary(name: str, rows: Sequence[Row]) -> Summary:
    """The summary of these rows, of which at least one is of our search."""
    ours = {_case(row): row for row in rows if row["search"] == OURS}
    others = {name: [row for row in rows if row["search"] == name] for name in {row["search"] for row in rows} - {OURS}}
    done = [row for row in ours.values() if "error" not in row]
    stating = [row for row in done if row["bound_holds"] is not None]
    return Summary(
        name=name,
        searches=len(ours),
        regret=Spread.of([_regret(row) for row in ours.values()]),
        bounds=len(stating),
        bounds_held=sum(row["bound_holds"] for row in stating),
        seconds_to_near=_spread(ours.values(), NEAR),
        seconds_to_near_of={name: _spread(own, NEAR) for name, own in sorted(others.items())},
        over={name: _over(ours, own) for name, own in sorted(others.items())},
        trials_to_best=_spread(ours.values(), "trials_to_best"),
        seconds_to_best=_spread(ours.values(), "seconds_to_best"),
        trials=_mean(done, "trials"),
        seconds=_mean(done, "seconds"),
        frontier=_mean(done, "frontier"),
        longest_seconds=max((row["longest_seconds"] for row in done), default=0.0),
        greedy=sum(row["longest_seconds"] > MOST_OF_BUDGET * BUDGET_SECONDS for row in done),
        computing_seconds=_mean(done, "computing_seconds"),
        failed=len(ours) - len(done),
        worst=max(ours, key=lambda case: _regret(ours[case])),
    )


def least_bounds_held(summaries: Iterable[Summary]) -> float | None:
    """Of the devices with `ENOUGH` stated bounds, the least share that held; None where no device has so many."""
    return min((s.bounds_held / s.bounds for s in summaries if s.bounds >= ENOUGH), default=None)


def _over(ours: Mapping[str, Row], others: Sequence[Row]) -> float | None:
    """The median of our seconds to within 5 % of the best over another's."""
    pairs = [(_to(ours[_case(row)], NEAR), _to(row, NEAR)) for row in others if _case(row) in ours]
    ratios = [own / other for own, other in pairs if math.isfinite(min(own, other))]
    return _finite(statistics.median(ratios)) if ratios else None


def _case(row: Row) -> str:
    return f"{row['problem']}/{row['device']}/{row['seed']}"


def _regret(row: Row) -> float:
    return 1.0 if "error" in row else float(row["regret"])


def _spread(rows: Iterable[Row], figure: str) -> Spread:
    return Spread.of([_to(row, figure) for row in rows])


def _to(row: Row, figure: str) -> float:
    known = row.get(figure)
    return math.inf if known is None else float(known)


def _mean(rows: Sequence[Row], figure: str) -> float:
    return statistics.fmean(row[figure] for row in rows) if rows else 0.0


def _finite(figure: float) -> float | None:
    return figure if math.isfinite(figure) else None
