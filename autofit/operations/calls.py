"""What `import autofit` offers: the commands as functions, by the names and with the defaults of their options."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from autofit import operations, techniques
from autofit.core.lattice import Config
from autofit.core.units import as_bytes, as_seconds
from autofit.core.workload import Goal, WorkloadKeywords, spelled_out
from autofit.planning.requests import SearchRequest, WorkloadOptions
from autofit.prediction.estimation import Estimation, config_on
from autofit.store import Store
from autofit.trial.machine.detection import detect

if TYPE_CHECKING:
    from autofit.core.frontier import Frontier, Recommendation
    from autofit.estimate.estimate import Estimate
    from autofit.operations.diagnosing.diagnosis import Diagnosis
    from autofit.operations.searching.result import SearchResult
    from autofit.search.progress import Progress

_log = logging.getLogger(__name__)


@spelled_out
def search(
    model: str,
    *,
    method: str = "any",
    min_rank: int = 8,
    allow: str = "numerics",
    space: str | None = None,
    hardware: str = "auto",
    device: str = "auto",
    memory_limit: str | int | None = None,
    max_trials: int | None = None,
    time_budget: str | float = "10m",
    workers: int | None = None,
    ray_address: str | None = None,
    store: str | None = None,
    fresh: bool = False,
    thorough: bool = False,
    predict: bool = True,
    in_place: bool = False,
    command: str | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
    **workload: Unpack[WorkloadKeywords],
) -> SearchResult:
    """Run real trials and recommend the fastest config that fits, as `autofit search` does.

    `memory_limit` is in bytes, or text such as "24GiB"; `time_budget` in seconds, or text such as "10m". `report` is
    called with the progress. Every trial is stored as it ends: the same call goes on after an interruption. Raises
    `UsageError`, `NothingFits`, and `EnvironmentLacks` if trials cannot run here.
    """
    request = SearchRequest(
        workload=WorkloadOptions.of(model=model, command=command, **workload),
        goal=Goal.of(method, min_rank, allow),
        space=space,
        hardware=hardware,
        device=device,
        memory_limit_bytes=as_bytes(memory_limit),
        max_trials=max_trials,
        time_budget_seconds=as_seconds(time_budget),
        workers=workers,
        ray_address=ray_address,
        in_place=in_place,
        store=store,
        fresh=fresh,
        thorough=thorough,
        predict=predict,
    )
    return operations.search(request, report)


@spelled_out
def estimate(
    model: str,
    config: Mapping[str, object] | Config | str,
    *,
    hardware: str = "auto",
    memory_limit: str | int | None = None,
    exact: bool = False,
    advice: bool = True,
    store: str | None = None,
    **workload: Unpack[WorkloadKeywords],
) -> Estimate:
    """Predict the memory and speed of a config, as `autofit estimate` does: no GPU is needed.

    `config` is axis -> value, or text such as "method=lora,micro_batch=4"; absent axes take the plain recipe's values.
    `memory_limit` is in bytes, or text such as "24GiB". `exact` traces every decoder layer. `advice` also looks for
    changes that make it fit, or faster. Raises `UsageError` for what cannot work there, saying why.
    """
    if hardware == "auto" and detect()[0].kind == "cpu":
        _log.warning("autofit: there is no GPU here, so this is for the processor: name a card with hardware=")
    if isinstance(config, str):
        config = techniques.parse(config)
    chosen = config if isinstance(config, Config) else config_on(hardware, config, model, workload.get("trainer"))
    estimation = Estimation.of(
        WorkloadOptions.of(model=model, **workload),
        chosen,
        hardware=hardware,
        memory_limit_bytes=as_bytes(memory_limit),
        exact=exact,
        store=store,
    )
    return estimation.advised() if advice else estimation.estimate()


def diagnose(
    config: str | Path,
    *,
    hardware: str = "auto",
    traceback: str | None = None,
    trainer: str | None = None,
    model: str | None = None,
    seq_len: int | None = None,
    devices: int | None = None,
    memory_limit: str | int | None = None,
    also: Mapping[str, object] | str | None = None,
) -> Diagnosis:
    """Whether the training that a trainer's own file asks for fits, and what to change, as `autofit diagnose` answers.

    `config` is the file; `traceback` the text of its out-of-memory error. `also` is axis -> value, or text, for what
    the file does not say. Raises `UsageError`, and `EnvironmentLacks` for a model that cannot be found here.
    """
    request = operations.DiagnosisRequest(
        hardware=hardware,
        trainer=trainer,
        model=model,
        seq_len=seq_len,
        devices=devices,
        memory_limit_bytes=as_bytes(memory_limit),
        also=techniques.parse(also) if isinstance(also, str) else also or {},
        failure=None if traceback is None else operations.read_traceback(traceback),
    )
    return operations.diagnose(Path(config), request)


@spelled_out
def recommend(
    model: str,
    *,
    hardware: str = "auto",
    memory_limit: str | int | None = None,
    method: str = "any",
    min_rank: int = 8,
    allow: str = "numerics",
    command: str | None = None,
    store: str | None = None,
    **workload: Unpack[WorkloadKeywords],
) -> Recommendation:
    """The fastest measured config that fits, from the store alone, as `autofit recommend` answers.

    `memory_limit` is in bytes, or text such as "24GiB"; by default, the device's memory. Raises `UsageError`,
    `NothingFits`, `NotMeasured` if no trial answers it, and `StoreError`.
    """
    with Store.open(store, create=False) as opened:
        return operations.recommend(
            WorkloadOptions.of(model=model, command=command, **workload),
            hardware=hardware,
            memory_limit_bytes=as_bytes(memory_limit),
            goal=Goal.of(method, min_rank, allow),
            store=opened,
        )


@spelled_out
def frontier(
    model: str,
    *,
    hardware: str = "auto",
    memory_limit: str | int | None = None,
    method: str = "any",
    min_rank: int = 8,
    allow: str = "numerics",
    command: str | None = None,
    store: str | None = None,
    **workload: Unpack[WorkloadKeywords],
) -> Frontier:
    """The measured configs that no other of their method beats in both memory and speed, as `autofit frontier` shows.

    `memory_limit` is in bytes, or text such as "24GiB". Raises as `recommend` does, but not `NothingFits`.
    """
    with Store.open(store, create=False) as opened:
        return operations.frontier(
            WorkloadOptions.of(model=model, command=command, **workload),
            hardware=hardware,
            goal=Goal.of(method, min_rank, allow),
            memory_limit_bytes=as_bytes(memory_limit),
            store=opened,
        )
