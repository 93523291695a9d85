"""The search's sampler for an Optuna study of the user's own, whose objective trains as the user does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autofit.core.lattice import Config
from autofit.planning.preparing import prepare
from autofit.planning.requests import SearchRequest
from autofit.prediction.allocator_shown import as_trials_show
from autofit.prediction.foreseeing import Foreseeing
from autofit.store import Store

if TYPE_CHECKING:
    from autofit.search.acquisition.sampler import LatticeSampler


def lattice_sampler(request: SearchRequest) -> LatticeSampler:
    """What chooses the configs of a search for `request`, for `optuna.create_study`; with every config's prediction.

    Trials of the store correct the predictions, but the request's own are not recalled: an objective of the user's own
    may measure something else. Raises `NothingFits` if nothing can fit.
    """
    from autofit.search.acquisition.acquisition import Advice
    from autofit.search.acquisition.sampler import LatticeSampler
    from autofit.search.lattice_state import Knowledge

    prepared = prepare(request)
    limit = prepared.memory_limit_bytes
    knowledge = Knowledge(prepared.narrowed.lattice, limit)
    open_: list[Config] = []
    for config in prepared.narrowed.lattice.configs:
        if prepared.floor(config) > limit:
            knowledge.rule_out(config, "weights, gradients and states alone exceed the limit")
        else:
            open_.append(config)
    advice = Advice(
        knowledge,
        prepared.floor,
        request.goal.methods,
        batch=prepared.job.workload.batch_per_device,
        budget_seconds=request.time_budget_seconds,
        thorough=request.thorough,
    )
    with Store.open(request.store) as store:
        foreseeing = Foreseeing(
            job=as_trials_show(prepared.job, store),
            configs=open_,
            memory_limit_bytes=limit,
            seconds=request.time_budget_seconds,
            store=store,
            one_host=True,
            predicts=request.predict,
        )
        foresight = foreseeing.foresee(lambda done, total: None)
    for config in foresight.beyond_host:
        knowledge.rule_out(config, "host memory is predicted not to suffice")
    advice.foresee(foresight)
    return LatticeSampler(knowledge, advice, prepared.job)
