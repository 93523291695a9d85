"""What the server has predicted in a process of its own: an estimate, and what a search would recommend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autofit.planning.requests import SearchRequest, WorkloadOptions
from autofit.prediction.estimation import Estimation, config_on
from autofit.prediction.predicted_frontier import predict_frontier


def estimated(
    options: WorkloadOptions,
    config: Mapping[str, object],
    *,
    hardware: str,
    memory_limit_bytes: int | None = None,
    advice: bool,
    store: str,
) -> dict[str, Any]:
    """An estimate as `autofit estimate --json` prints it; axes that `config` leaves out take the plain recipe's values.

    Raises `UsageError`.
    """
    estimation = Estimation.of(
        options,
        config_on(hardware, config, options.trainer),
        hardware=hardware,
        memory_limit_bytes=memory_limit_bytes,
        store=store,
    )
    return (estimation.advised() if advice else estimation.estimate()).to_json()


def predicted_recommendation(request: SearchRequest) -> dict[str, Any] | None:
    """What a search is predicted to recommend, with the keys of a measured recommendation; None if no speed can be
    predicted.

    Raises `UsageError`, and `NothingFits`.
    """
    frontier = predict_frontier(request)
    if frontier.recommendation is None:
        return None
    job = frontier.plan.job
    return {
        **frontier.recommendation.to_json(),
        "memory_limit_bytes": frontier.plan.limits.memory_bytes,
        **{name: getattr(job, name).to_json() for name in ("hardware", "workload", "stack")},
    }
