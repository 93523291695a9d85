"""The search's sampler for an Optuna study of the user's own, whose objective trains as the user does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autofit.planning.plan import resolve
from autofit.planning.requests import SearchRequest
from autofit.prediction.lattice_predictor import LatticePredictor
from autofit.store import Store

if TYPE_CHECKING:
    from autofit.search.acquisition.sampler import LatticeSampler


def lattice_sampler(request: SearchRequest) -> LatticeSampler:
    """What chooses the configs of a search for `request`, for `optuna.create_study`; with every config's prediction.

    Trials of the store correct the predictions, but the request's own are not recalled: an objective of the user's own
    may measure something else. Raises `NothingFits` if nothing can fit.
    """
    from autofit.search.acquisition.acquisition import Acquisition
    from autofit.search.acquisition.sampler import LatticeSampler
    from autofit.search.lattice_state import LatticeState

    plan = resolve(request)
    state = LatticeState.of(plan)
    acquisition = Acquisition(plan, state)
    with Store.open(request.store) as store:
        predictor = LatticePredictor(plan=plan, request=request, store=store)
        predictions = predictor.predict(lambda done, total: None)
    state.rule_out(dict.fromkeys(predictions.beyond_host, "host memory is predicted not to suffice"))
    acquisition.use(predictions)
    return LatticeSampler(state, acquisition, plan.job)
