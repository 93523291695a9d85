"""The Python API: one function per thing a user can do. The command line and the server only call these."""

from __future__ import annotations

from autofit.operations.answers import frontier, recommend
from autofit.operations.estimating import Estimation, estimate
from autofit.operations.explaining import Explanation, explain
from autofit.operations.keeping import Keeper
from autofit.operations.over_devices import OverDevices, search_over_devices
from autofit.operations.predicted_frontier import PredictedFrontier, predict_frontier
from autofit.operations.recording import RecordResult, read_table, record
from autofit.operations.replaying import SEEDS, ReplayResult, replay
from autofit.operations.requests import SearchRequest, WorkloadOptions, hub_id
from autofit.operations.residuals import residuals
from autofit.operations.searching import SearchResult, search
from autofit.operations.single_trial import trial

__all__ = [
    "SEEDS",
    "Estimation",
    "Explanation",
    "Keeper",
    "OverDevices",
    "PredictedFrontier",
    "RecordResult",
    "ReplayResult",
    "SearchRequest",
    "SearchResult",
    "WorkloadOptions",
    "estimate",
    "explain",
    "frontier",
    "hub_id",
    "predict_frontier",
    "read_table",
    "recommend",
    "record",
    "replay",
    "residuals",
    "search",
    "search_over_devices",
    "trial",
]
