"""Hardware side by side for one workload, with what tokens cost."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from autofit.api.page.forms import choices, chosen, workload_query
from autofit.api.page.rendering import PageRoute, render
from autofit.api.routes.common import Models, NamedModels, OpenedStore
from autofit.api.routes.query import GoalQuery, WorkloadQuery
from autofit.operations.hardware_compared import OnHardware, compare_hardware, price_of_an_hour
from autofit.store import Store

ROUTES = APIRouter(route_class=PageRoute)
PRICE = "price."
"""What the name of the field begins with that has the price of a device for an hour; the hardware's name follows."""


class Compared(GoalQuery):
    """The fields of the page's form; what is left out is that of the workload that was measured last."""

    model: str = ""
    seq_len: int | None = None
    global_batch: int | None = None
    devices: int | None = None
    trainer: str | None = Field(default=None, alias="for")
    lengths: str | None = None
    eval_batch: int | None = None


@ROUTES.get("/hardware")
def hardware(request: Request, store: OpenedStore, models: Models, query: Annotated[Compared, Query()]) -> Response:
    form, model = chosen(request.query_params.items()), query.model
    workload = _workload(store, models, query)
    prices = {
        name.removeprefix(PRICE): price_of_an_hour(text)
        for name, text in request.query_params.items()
        if name.startswith(PRICE)
    }
    rows: list[tuple[OnHardware, float | None]] = []
    fields: dict[str, Any] = {}
    if workload is not None:
        fields = workload_query(workload, **({"model": model} if model else {}))
        form |= {name: str(value) for name, value in fields.items()}
        rows = [
            (row, row.cost(prices.get(row.name))) for row in compare_hardware(workload, goal=query.goal(), store=store)
        ]
    return render(
        request,
        "hardware.html",
        rows=rows,
        prices=prices,
        workload=workload,
        emulated=any(row.recommendation and row.recommendation.hardware.is_emulated for row, _ in rows),
        fields=fields,
        chosen=form,
        **choices(store, models),
    )


def _workload(store: Store, models: NamedModels, query: Compared) -> Any:
    """The workload that is asked about; without figures, the one of the model that was measured last."""
    given = query.model_dump(exclude={"model", *GoalQuery.model_fields}, exclude_none=True, by_alias=True)
    latest = [w for w in store.workloads(model=query.model or None) if w.program is None]
    if latest and not given:
        return latest[0]
    return WorkloadQuery(model=query.model, **given).workload(store, models) if query.model else None
