"""A search for each number of devices up to the user's, at a constant global batch: what each further device gains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from autofit.core.errors import AutofitError, EnvironmentLacks, NothingFits, Shortfall, StoreError, UsageError
from autofit.core.units import counted
from autofit.core.workload import METHODS, check_count, check_shared_equally
from autofit.operations.searching.result import SearchResult
from autofit.operations.searching.search import search
from autofit.planning.requests import SearchRequest

if TYPE_CHECKING:
    from autofit.search.progress import Progress


NEAR = 0.05
"""By what share of the best speed a smaller number of devices may be slower and still be named beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverDevices:
    """How the searches ended. At least one has found something."""

    results: Mapping[int, SearchResult]
    """By number of devices, ascending."""
    unanswered: Mapping[int, AutofitError]
    """Numbers of devices whose search found nothing, each with the reason: nothing fits, or nothing could be run."""

    @property
    def best(self) -> SearchResult:
        """The fastest in total of the most faithful method that fits; of equals, the one with the fewest devices."""
        points = {devices: result.recommendation.point for devices, result in self.results.items()}
        return self.results[min(points, key=lambda n: (METHODS.index(points[n].method), -points[n].tokens_per_second))]

    @property
    def fewest(self) -> SearchResult:
        """Of the best's method, the one with the fewest devices that is slower by no more than `NEAR`."""
        best = self.best.recommendation.point
        points = ((result, result.recommendation.point) for result in self.results.values())
        of_method = ((result, point.tokens_per_second) for result, point in points if point.method == best.method)
        return next(result for result, speed in of_method if speed >= (1.0 - NEAR) * best.tokens_per_second)

    @property
    def left_out(self) -> tuple[int, ...]:
        """The smaller numbers of devices that were not searched, because they do not divide the global batch."""
        searched = {*self.results, *self.unanswered}
        return tuple(n for n in range(1, max(searched)) if n not in searched)

    def to_json(self) -> dict[str, Any]:
        """The best search's result, all of them in `by_devices`, the number of `fewest`, and `left_out`."""
        return {
            **self.best.to_json(),
            "by_devices": [self._entry(n) for n in sorted({*self.results, *self.unanswered})],
            "fewest_devices": self.fewest.frontier.workload.devices,
            "devices_left_out": list(self.left_out),
        }

    def _entry(self, devices: int) -> dict[str, Any]:
        if devices in self.unanswered:
            reason = self.unanswered[devices]
            outcome = "nothing_fits" if isinstance(reason, NothingFits) else "failed"
            return {"devices": devices, "outcome": outcome, "reason": str(reason)}
        result = self.results[devices]
        speed = result.recommendation.point.tokens_per_second
        return {"devices": devices, "tokens_per_second_per_device": speed / devices, **result.to_json()}


def requests_over_devices(request: SearchRequest) -> dict[int, SearchRequest]:
    """A request for the number of devices of `request`, and for each smaller one that divides the global batch.

    Each has an equal share of the time budget: the store answers it if an earlier one had as much. Raises `UsageError`.
    """
    workload = request.workload
    check_count("devices", workload.devices)
    check_count("global-batch", workload.global_batch)
    check_shared_equally(workload.global_batch, workload.devices)
    counts = [n for n in range(1, workload.devices + 1) if workload.global_batch % n == 0]
    budget = request.time_budget_seconds
    share = None if budget is None else budget / len(counts)
    return {n: replace(request, workload=replace(workload, devices=n), time_budget_seconds=share) for n in counts}


def search_over_devices(
    request: SearchRequest, report: Callable[[Progress], None] = lambda progress: None
) -> OverDevices:
    """Search with each number of devices of `requests_over_devices`; `max_trials` applies to each.

    Like `search`, it resumes where it was interrupted. Raises `NothingFits` only if nothing fits on any of these
    numbers, and what `requests_over_devices` and `search` raise; but once a number has been answered, a smaller one
    that cannot be searched costs no more than its own answer.
    """
    requests = requests_over_devices(replace(request, campaign_id=uuid4().hex))
    results: dict[int, SearchResult] = {}
    reasons: dict[int, AutofitError] = {}
    # From the largest number down, so that missing devices, or a space with nothing for them, are reported at once.
    for devices, sized_request in reversed(requests.items()):
        try:
            results[devices] = search(sized_request, report)
        except NothingFits as failure:
            reasons[devices] = failure
        except StoreError:
            raise  # it is of no number of devices
        except (UsageError, EnvironmentLacks) as failure:
            if not results:
                raise
            reasons[devices] = failure
    if results:
        return OverDevices(results=dict(sorted(results.items())), unanswered=dict(sorted(reasons.items())))
    last = reasons[1]
    message = "; ".join(f"on {counted(n, 'device')}: {reason}" for n, reason in sorted(reasons.items()))
    if isinstance(last, Shortfall):
        raise Shortfall(message, memory_limit_bytes=last.memory_limit_bytes, closest=last.closest) from last
    raise NothingFits(message) from last
