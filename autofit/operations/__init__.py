"""The Python API: one function per thing a user can do. The command line and the server only call these, and
`bench` for replays.

Each is imported on first use, so that a recommendation from the store does not wait for the training libraries.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autofit.operations.answers import frontier, recommend
    from autofit.operations.comparing import residuals
    from autofit.operations.estimating import Estimation, estimate
    from autofit.operations.explaining import Explanation, explain
    from autofit.operations.keeping import Keeper
    from autofit.operations.over_devices import OverDevices, search_over_devices
    from autofit.operations.predicted_frontier import PredictedFrontier, predict_frontier
    from autofit.operations.recording import RecordResult, read_table, record
    from autofit.operations.requests import SearchRequest, WorkloadOptions, hub_id
    from autofit.operations.sampling import lattice_sampler
    from autofit.operations.searching import SearchResult, search
    from autofit.operations.single_trial import trial

__all__ = [
    "Estimation",
    "Explanation",
    "Keeper",
    "OverDevices",
    "PredictedFrontier",
    "RecordResult",
    "SearchRequest",
    "SearchResult",
    "WorkloadOptions",
    "estimate",
    "explain",
    "frontier",
    "hub_id",
    "lattice_sampler",
    "predict_frontier",
    "read_table",
    "recommend",
    "record",
    "residuals",
    "search",
    "search_over_devices",
    "trial",
]

_MODULES = {
    "answers": ("frontier", "recommend"),
    "comparing": ("residuals",),
    "estimating": ("Estimation", "estimate"),
    "explaining": ("Explanation", "explain"),
    "keeping": ("Keeper",),
    "over_devices": ("OverDevices", "search_over_devices"),
    "predicted_frontier": ("PredictedFrontier", "predict_frontier"),
    "recording": ("RecordResult", "read_table", "record"),
    "requests": ("SearchRequest", "WorkloadOptions", "hub_id"),
    "sampling": ("lattice_sampler",),
    "searching": ("SearchResult", "search"),
    "single_trial": ("trial",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value  # later look-ups bypass this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
