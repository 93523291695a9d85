"""What the server has predicted in a process of its own: an estimate, and what a search would recommend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autofit.planning.requests import SearchRequest, WorkloadOptions
from autofit.prediction.estimating import Estimation, config_on
from autofit.prediction.predicted_frontier import predict_frontier


def estimated(asked: Mapping[str, Any], store: str) -> dict[str, Any]:
    """An estimate as `autofit estimate --json` prints it. `asked` has the fields of `WorkloadOptions`, `config` (axes
    and values; absent ones take the plain recipe's), `hardware`, `memory_limit_bytes` and `advice`.

    Raises `UsageError`.
    """
    rest = dict(asked)
    config, hardware, limit, advice = (rest.pop(n) for n in ("config", "hardware", "memory_limit_bytes", "advice"))
    estimation = Estimation.of(
        WorkloadOptions(**rest),
        config_on(hardware, config, rest.get("trainer")),
        hardware=hardware,
        memory_limit_bytes=limit,
        store=store,
    )
    return (estimation.advised() if advice else estimation.estimate()).to_json()


def predicted_recommendation(asked: Mapping[str, Any], store: str) -> dict[str, Any] | None:
    """What a search is predicted to recommend, with the keys of a measured recommendation; None if no speed can be
    predicted. `asked` has the fields of `WorkloadOptions`, `goal`, `hardware` and `memory_limit_bytes`.

    Raises `UsageError`, and `NothingFits`.
    """
    rest = dict(asked)
    goal, hardware, limit = (rest.pop(name) for name in ("goal", "hardware", "memory_limit_bytes"))
    request = SearchRequest(
        workload=WorkloadOptions(**rest), goal=goal, hardware=hardware, memory_limit_bytes=limit, store=store
    )
    found = predict_frontier(request)
    if found.recommendation is None:
        return None
    job = found.plan.job
    return {
        **found.recommendation.to_json(),
        "memory_limit_bytes": found.plan.limits.memory_bytes,
        **{name: getattr(job, name).to_json() for name in ("hardware", "workload", "stack")},
    }
