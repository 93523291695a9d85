"""Measures a search space exhaustively into a file, on which search methods can be compared."""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from autofit.core.document import Document
from autofit.core.errors import EnvironmentLacks, UsageError
from autofit.core.lattice import Config, Value
from autofit.core.outcome import DEADLINE_SECONDS, Fits, Outcome, Trial, machinery_failed, now, worker_was_lost
from autofit.core.workload import Effect, Goal
from autofit.operations.recording import table_file
from autofit.operations.searching.search import open_pool
from autofit.planning.plan import Plan, resolve
from autofit.planning.requests import SearchRequest
from autofit.prediction.calibration import is_detected
from autofit.prediction.probing import undisturbed_probe
from autofit.search.budget import LEAST_DEADLINE_SECONDS, TIMING_SECONDS
from autofit.search.failures import FailuresInARow
from autofit.techniques import Job
from autofit.trial.request import Rival, TrialRequest
from autofit.workers.pool import Completed, Pool

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordResult(Document):
    """How far a recording has come."""

    configs: int
    """Valid configs of the space."""
    recorded: int
    """How many of these are in the file."""
    run: int
    """Trials run by this call."""
    left: int
    """Trials that are still to be run: what the time budget was not enough for, or the machinery failed."""
    outcomes: dict[str, int]
    """Number of recorded trials by outcome."""
    file: str


def record(
    request: SearchRequest,
    file: Path,
    report: Callable[[int, int, Trial | None], None] = lambda done, total, last: None,
    *,
    time_budget_seconds: float | None = None,
    trial_seconds: float | None = None,
    covering: bool = False,
) -> RecordResult:
    """Measure every valid config of the request's space into `file`, in an order shuffled by the workload's seed.

    Each trial is written as it ends; a further call goes on. The first `request.max_trials` of the shuffled configs are
    measured or, if `covering`, those that `_covering` chooses. No trial begins once the time budget is spent, and none
    may take longer than all of it. With `trial_seconds`, one that would take longer, or that is beaten many times over,
    is cut as in a search. `report` is called with the number of trials recorded, their total, and the last one (None at
    the start). Raises `UsageError` for a file that holds anything else.
    """
    budget = math.inf if time_budget_seconds is None else time_budget_seconds
    ends = time.monotonic() + budget
    # A trial that no call ever let end would be begun by each of them.
    deadline = min(DEADLINE_SECONDS, max(LEAST_DEADLINE_SECONDS, budget))
    request = replace(request, goal=Goal(method="any", allow=Effect.TRAINING))
    with ExitStack() as opened:
        # What a cluster has and can run, its workers alone can say; others are started only if anything is to run.
        pool = opened.enter_context(closing(open_pool(request))) if request.ray_address is not None else None
        plan = resolve(request, pool)
        opened.enter_context(_locked(file))
        outcomes = _begun(file, request, plan)
        configs = [config for config in _chosen(plan, request.max_trials, covering=covering) if config not in outcomes]
        before, total = len(outcomes), len(outcomes) + len(configs)
        report(before, total, None)
        if configs and time.monotonic() < ends:
            pool = pool or opened.enter_context(closing(open_pool(request)))
            _check_site(pool, plan.job)
            requests = _requests(plan, configs, outcomes, deadline_seconds=deadline, trial_seconds=trial_seconds)
            for trial_request, attempt in _run_all(pool, takewhile(lambda _: time.monotonic() < ends, requests)):
                table_file.append(file, table_file.line_of(trial_request.config, attempt))
                outcomes[trial_request.config] = attempt.outcome
                report(len(outcomes), total, trial_request.trial(attempt))
    return RecordResult(
        configs=len(plan.lattice.configs),
        recorded=len(outcomes),
        run=len(outcomes) - before,
        left=total - len(outcomes),
        outcomes=dict(Counter(outcome.kind for outcome in outcomes.values())),
        file=str(file),
    )


def _chosen(plan: Plan, most: int | None, *, covering: bool) -> list[Config]:
    """At most `most` of the configs, in the order in which they are measured: shuffled by the workload's seed."""
    configs = list(plan.lattice.configs)
    random.Random(plan.job.workload.seed).shuffle(configs)
    return _covering(configs, most) if covering and most is not None else configs[:most]


def _covering(configs: Sequence[Config], most: int) -> list[Config]:
    """At most `most` of the configs, in rounds: within each, every config has as many values as can be that the round
    still lacks; of equals, the first. A value that few configs have is thus not left out by chance."""
    remaining, chosen = dict.fromkeys(configs), list[Config]()
    lacking: set[tuple[str, Value]] = set()
    while remaining and len(chosen) < most:
        lacking = lacking or {value for config in remaining for value in config.items}
        best = max(remaining, key=lambda config: len(lacking.intersection(config.items)))
        if lacking.isdisjoint(best.items):
            lacking = set()  # what is left has none of them
            continue
        lacking.difference_update(best.items)
        chosen.append(best)
        del remaining[best]
    return chosen


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Lock the file, so that no two recordings write to it at once."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = file.open("a", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error
    with opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{file} is being recorded by another process: let it end, or give another --out"
            ) from None
        yield


def _requests(
    plan: Plan,
    configs: Sequence[Config],
    outcomes: Mapping[Config, Outcome],
    *,
    deadline_seconds: float,
    trial_seconds: float | None,
) -> Iterator[TrialRequest]:
    """The trials of these configs; the rivals of each are what has fitted when it is asked for."""
    limit = plan.limits.memory_bytes
    for config in configs:
        yield TrialRequest(
            job=plan.job,
            config=config,
            memory_limit_bytes=limit,
            deadline_seconds=deadline_seconds,
            allowance_seconds=trial_seconds,
            timing_seconds=TIMING_SECONDS,
            rivals=() if trial_seconds is None else _rivals(config, outcomes, limit),
        )


def _rivals(config: Config, outcomes: Mapping[Config, Outcome], limit: int) -> tuple[Rival, ...]:
    """The fastest of the config's method that has fitted, as heavy as may be: so it ends no timing too soon."""
    speeds = [
        outcome.measurement.tokens_per_second
        for other, outcome in outcomes.items()
        if isinstance(outcome, Fits) and other["method"] == config["method"]
    ]
    return (Rival(device_bytes=limit, tokens_per_second=max(speeds)),) if speeds else ()


def _check_site(pool: Pool, job: Job) -> None:
    hardware, stack = pool.site()
    if (hardware.key, stack.key) != (job.hardware.key, job.stack.key):
        raise EnvironmentLacks(
            f"the workers have {hardware.name} and {stack}, the recording is of {job.hardware.name} and {job.stack}",
            remedy="record where the trials run, in the same environment",
        )


def _run_all(pool: Pool, requests: Iterator[TrialRequest]) -> Iterator[Completed]:
    """Run the requests, and again where the device was disturbed or the worker lost. Others that fail through no fault
    of their config are left; raises `EnvironmentLacks` where that happens again and again (`FailuresInARow`)."""
    under_way: dict[Config, int] = {}
    failures = FailuresInARow()
    repeated: set[Config] = set()
    while True:
        while len(under_way) < max(1, pool.size) and (following := next(requests, None)) is not None:
            pool.submit(following)
            under_way[following.config] = failures.begin()
        if not under_way:
            return
        # What was measured is kept before anything is raised.
        for request, attempt in sorted(pool.wait(1.0), key=lambda done: machinery_failed(done[1].outcome)):
            number, outcome = under_way.pop(request.config), attempt.outcome
            is_doubtful = request.trial(attempt).doubts or worker_was_lost(outcome)
            if machinery_failed(outcome):
                failures.failed(number, outcome)
            if is_doubtful and request.config not in repeated:
                repeated.add(request.config)
                requests = chain([request], requests)
            elif not machinery_failed(outcome):
                failures.passed()
                yield request, attempt


def _begun(file: Path, request: SearchRequest, plan: Plan) -> dict[Config, Outcome]:
    """The outcomes that `file` already holds of this recording; one without a whole header gets it."""
    job = plan.job
    of_job = {name: getattr(job, name).to_json() for name in ("hardware", "stack", "workload")}
    header = {"schema": table_file.SCHEMA, **of_job, "space": plan.space}
    header["memory_limit_bytes"] = plan.limits.memory_bytes
    text, content = json.dumps(header)[:-1].encode(), file.read_bytes()
    if text.startswith(content) or (content.startswith(text) and b"\n" not in content):
        os.truncate(file, 0)
        table_file.append(file, {**header, "recorded_at": now(), **_probed(request, plan)})
        return {}
    table = table_file.read_table(file)
    # Another machine with the same device may have more host memory.
    for name in table_file.SAME:
        if table.header[name] != header[name] and (name != "hardware" or table.hardware.key != job.hardware.key):
            raise UsageError(f"{file} is a recording with another {name.replace('_', ' ')}: give another --out")
    table_file.drop_torn_line(file)
    return {trial.config: trial.outcome for trial in table.trials}


def _probed(request: SearchRequest, plan: Plan) -> dict[str, Any]:
    """A probe of the device as a field of the header; none where that is not in this machine or cannot be probed."""
    job = plan.job
    if request.ray_address is not None or not is_detected(job.hardware):
        return {}
    try:
        return {"probe": undisturbed_probe(job.model, job.hardware, job.stack).to_json()}
    except EnvironmentLacks as error:
        _log.warning("autofit: recording without a probe: %s", error)
        return {}
