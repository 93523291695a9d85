"""One trial: its config, what it measured, its bytes by kind, and its config in every format of an export."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Path, Request, Response

from autofit import export, operations
from autofit.api.page.forms import workload_query
from autofit.api.page.rendering import PageRoute, render
from autofit.api.routes.common import Models, OpenedStore
from autofit.core.outcome import Trial
from autofit.core.units import LARGEST_INTEGER
from autofit.operations import WorkloadOptions
from autofit.operations.recommendation import of_trial
from autofit.prediction.estimation import estimated
from autofit.techniques import AXES, changes

ROUTES = APIRouter(route_class=PageRoute)


def stored_trial(trial_id: Annotated[int, Path(ge=1, le=LARGEST_INTEGER)], store: OpenedStore) -> Trial:
    trial = store.trial(trial_id)
    if trial is None:
        raise HTTPException(404, f"there is no trial {trial_id}")
    return trial


StoredTrial = Annotated[Trial, Depends(stored_trial)]


@ROUTES.get("/point/{trial_id}")
def point(request: Request, trial: StoredTrial, models: Models) -> Response:
    plain = {axis.name: axis.recipe for axis in AXES}
    rows = [(name, value, name != "method" and plain.get(name) == value) for name, value in trial.config.items]
    return render(
        request,
        "point.html",
        trial=trial,
        measurement=trial.measurement,
        outcome=models.told(trial.outcome.to_json()),
        departs=[(name, value) for name, value, usual in rows if not usual],
        usual=[(name, value) for name, value, usual in rows if usual],
        changes=changes(trial.config),
        formats=export.formats_for(trial.workload.trainer, trial.workload.program),
        fields=workload_query(trial.workload, hardware=trial.hardware.name),
    )


@ROUTES.get("/point/{trial_id}/bytes")
def of_kinds(request: Request, trial: StoredTrial, store: OpenedStore, models: Models) -> Response:
    estimate = request.app.state.estimating.call(
        estimated,
        WorkloadOptions.of_workload(trial.workload, model=models.named(trial.workload.model)),
        trial.config.to_json(),
        hardware=trial.hardware.name,
        memory_limit_bytes=None,  # one that was enforced may exceed what the catalog says that the card has
        advice=False,
        store=store.url,
    )
    return render(request, "_bytes.html", estimate=estimate)


@ROUTES.get("/point/{trial_id}/export/{format}")
def exported(request: Request, trial: StoredTrial, store: OpenedStore, models: Models, format: str) -> Response:
    export.check_format(format)
    model = trial.workload.model
    source = operations.hub_id(models.find(model) or model)
    result = export.export(of_trial(trial, store), format=format, source=source)
    return render(request, "_export.html", format=format, text=models.by_name(result.text), notes=result.notes)
