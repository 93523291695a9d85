"""Measures a search space exhaustively into a file, on which search methods can be compared."""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from autofit.core.errors import EnvironmentLacks, UsageError
from autofit.core.hardware import Hardware, Stack
from autofit.core.lattice import Config, Value
from autofit.core.outcome import DEADLINE_SECONDS, Fits, Outcome, Trial, machinery_failed, now
from autofit.core.workload import Effect, Goal
from autofit.operations.recording import table_file
from autofit.operations.searching import open_pool
from autofit.planning.plan import Plan, resolve
from autofit.planning.requests import SearchRequest
from autofit.prediction.calibration import is_detected
from autofit.prediction.probing import undisturbed_probe
from autofit.search.budget import LEAST_DEADLINE_SECONDS, TIMING_SECONDS
from autofit.trial.request import Rival, TrialRequest
from autofit.workers.pool import Completed, Pool

_log = logging.getLogger(__name__)

MACHINERY_FAILURES = 3
"""Number of consecutive failures through no fault of the configs after which recording ends."""


class _Budget:
    """The time that a call of `record` may take, and that each of its trials may."""

    def __init__(self, seconds: float | None, trial_seconds: float | None) -> None:
        """Unlimited if None."""
        self.trial_seconds = trial_seconds
        self._ends = math.inf if seconds is None else time.monotonic() + seconds
        self.deadline_seconds = DEADLINE_SECONDS
        """Of one trial. A trial that no call ever let end would be begun by each of them."""
        if seconds is not None:
            self.deadline_seconds = min(DEADLINE_SECONDS, max(LEAST_DEADLINE_SECONDS, seconds))

    @property
    def spent(self) -> bool:
        """Whether no further trial may begin."""
        return time.monotonic() >= self._ends


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordResult:
    """How far a recording has come."""

    configs: int
    """Valid configs of the space."""
    recorded: int
    """How many of these are in the file, once or more."""
    run: int
    """Trials run by this call."""
    left: int
    """Trials that are still to be run: what the time budget was not enough for, or the machinery failed."""
    outcomes: dict[str, int]
    """Number of recorded trials by outcome."""
    file: str

    def to_json(self) -> dict[str, Any]:
        return {
            "configs": self.configs,
            "recorded": self.recorded,
            "run": self.run,
            "left": self.left,
            "outcomes": dict(self.outcomes),
            "file": self.file,
        }


def record(
    request: SearchRequest,
    file: Path,
    report: Callable[[int, int, Trial | None], None] = lambda done, total, last: None,
    *,
    passes: int = 1,
    time_budget_seconds: float | None = None,
    trial_seconds: float | None = None,
    covering: bool = False,
) -> RecordResult:
    """Measure every valid config of the request's space into `file`, in an order shuffled by the workload's seed.

    Each trial is written as it ends, and an interrupted recording resumes where it stopped. Of the shuffled configs the
    first `request.max_trials` are measured or, if `covering`, those that have every value of every axis again and again
    (`_covering`). With several `passes` they are measured that many times, each time in a different order: how much
    trials of one config vary shows only when time has passed between them. No trial begins once the time budget is
    spent, and none may take longer than all of it; a further call goes on. With `trial_seconds`, a trial that would
    take longer, or that is beaten many times over, is cut as in a search, and recorded with the lower bound of its
    step, unless it may be the fastest so far. `report` is called with the number of trials recorded, their total, and
    the last one (None at the start). Raises `UsageError` for a file that holds anything
    else.
    """
    budget = _Budget(time_budget_seconds, trial_seconds)
    if passes < 1:
        raise UsageError(f"passes is {passes}: it must be at least 1")
    request = replace(request, goal=Goal(method="any", allow=Effect.TRAINING))
    # What a cluster has and can run, its workers alone can say.
    pool = open_pool(request) if request.ray_address is not None else None
    try:
        plan = resolve(request, pool)
        orders = [_order(plan, request.max_trials, number, covering=covering) for number in range(1, passes + 1)]
        return _record(request, plan, pool, file, report, orders, budget)
    finally:
        if pool is not None:
            pool.close()


def _record(
    request: SearchRequest,
    plan: Plan,
    pool: Pool | None,
    file: Path,
    report: Callable[[int, int, Trial | None], None],
    orders: list[list[Config]],
    budget: _Budget,
) -> RecordResult:
    """`record` once it is known what is to run, pass by pass; `pool` is None where workers are started only if anything
    is to run."""
    job = plan.job
    header = {
        "hardware": job.hardware.to_json(),
        "stack": job.stack.to_json(),
        "workload": job.workload.to_json(),
        "space": plan.space,
        "memory_limit_bytes": plan.limits.memory_bytes,
    }
    run = 0
    with _alone(file):
        known = _continued(file, header, job.hardware, partial(_probed, request, plan))
        wanted = [
            (number, config)
            for number, order in enumerate(orders, start=1)
            for config in order
            if (number, config) not in known
        ]
        total = len(known) + len(wanted)
        report(len(known), total, None)
        for number, done in _measured(request, plan, pool, wanted, budget, known):
            table_file.append(file, _line(number, done))
            known[number, done.request.config] = done.outcome
            run += 1
            last = done.trial(done.request.config, job, memory_limit_bytes=plan.limits.memory_bytes)
            report(len(known), total, last)
    kinds = [outcome.kind for outcome in known.values()]
    return RecordResult(
        configs=len(plan.lattice.configs),
        recorded=len({config for _, config in known}),
        run=run,
        left=total - len(known),
        outcomes={kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        file=str(file),
    )


def _order(plan: Plan, most: int | None, number: int, *, covering: bool) -> list[Config]:
    """The configs in the order of a pass: those of the first pass, shuffled by the workload's seed, at most `most`;
    every later pass has the same ones in another order."""
    seed = plan.job.workload.seed
    configs = list(plan.lattice.configs)
    random.Random(seed).shuffle(configs)
    chosen = _covering(configs, most) if covering and most is not None else configs[:most]
    if number > 1:
        random.Random(seed + number - 1).shuffle(chosen)
    return chosen


def _covering(configs: Sequence[Config], most: int) -> list[Config]:
    """At most `most` of the configs, in rounds: within each, every config has as many values as can be that the round
    still lacks; of equals, the first. A value that few configs have is thus not left out by chance."""
    left, chosen = dict.fromkeys(configs), list[Config]()
    lacking: set[tuple[str, Value]] = set()
    while left and len(chosen) < most:
        lacking = lacking or {value for config in left for value in config.items}
        best = max(left, key=lambda config: len(lacking.intersection(config.items)))
        if lacking.isdisjoint(best.items):
            lacking = set()  # what is left has none of them
            continue
        lacking.difference_update(best.items)
        chosen.append(best)
        del left[best]
    return chosen


@contextmanager
def _alone(file: Path) -> Iterator[None]:
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


def _measured(
    request: SearchRequest,
    plan: Plan,
    pool: Pool | None,
    wanted: list[tuple[int, Config]],
    budget: _Budget,
    known: Mapping[tuple[int, Config], Outcome],
) -> Iterator[tuple[int, Completed]]:
    """Run the configs of each pass, timed as in a search, so that each trial's cost is recorded with its outcome. None
    begins once the budget is spent."""
    if not wanted or budget.spent:
        return
    job = plan.job
    fastest = _Fastest(plan.limits.memory_bytes, known)
    pool = pool or open_pool(request)
    try:
        _check_site(pool, job.hardware, job.stack)
        for number, part in itertools.groupby(wanted, key=lambda entry: entry[0]):
            requests = (
                TrialRequest(
                    job=job,
                    config=config,
                    memory_limit_bytes=plan.limits.memory_bytes,
                    deadline_seconds=budget.deadline_seconds,
                    allowance_seconds=budget.trial_seconds,
                    timing_seconds=TIMING_SECONDS,
                    rivals=fastest.of(config) if budget.trial_seconds is not None else (),
                )
                for _, config in itertools.takewhile(lambda _: not budget.spent, part)
            )
            for done in _run_all(pool, requests):
                fastest.add(done.request.config, done.outcome)
                yield number, done
    finally:
        pool.close()


class _Fastest:
    """The fastest that has fitted of each method, as heavy as any may be: so that it ends no trial's timing before that
    is as sure as the others'."""

    def __init__(self, limit: int, known: Mapping[tuple[int, Config], Outcome]) -> None:
        self._limit = limit
        self._of: dict[str, Rival] = {}
        for (_, config), outcome in known.items():
            self.add(config, outcome)

    def add(self, config: Config, outcome: Outcome) -> None:
        """Take note of a trial."""
        if isinstance(outcome, Fits):
            speed = outcome.measurement.tokens_per_second
            rival = Rival(device_bytes=self._limit, tokens_per_second=speed)
            known = self._of.get(config.text("method"), rival)
            self._of[config.text("method")] = max(known, rival, key=lambda one: one.tokens_per_second)

    def of(self, config: Config) -> tuple[Rival, ...]:
        """What a trial of `config` has to beat."""
        return tuple(rival for method, rival in self._of.items() if method == config["method"])


def _check_site(pool: Pool, hardware: Hardware, stack: Stack) -> None:
    found = pool.site()
    if (found[0].key, found[1].key) != (hardware.key, stack.key):
        raise EnvironmentLacks(
            f"the workers have {found[0].name} and {found[1]}, the recording is of {hardware.name} and {stack}",
            remedy="record where the trials run, in the same environment",
        )


def _line(number: int, done: Completed) -> dict[str, Any]:
    """What a recorded table keeps of a trial of this pass."""
    line: dict[str, Any] = {"config": done.request.config.to_json()}
    if number > 1:
        line["pass"] = number
    line |= {**done.outcome.to_json(), "seconds": done.seconds}
    return line if done.device_state is None else {**line, "device_state": done.device_state.to_json()}


def _run_all(pool: Pool, requests: Iterator[TrialRequest]) -> Iterator[Completed]:
    """Run the requests, as many at a time as there are workers, and a second time where the device was busy with
    something else or throttled; what its state was then is kept with the trial. Trials that fail through no fault of
    their config are left for the next run; raises `EnvironmentLacks` after `MACHINERY_FAILURES` of them in a row."""
    under_way = failures = 0
    repeated: set[Config] = set()
    while True:
        while under_way < pool.size and (request := next(requests, None)) is not None:
            pool.submit(request)
            under_way += 1
        if not under_way:
            return
        # What was measured is kept before anything is raised.
        for done in sorted(pool.wait(1.0), key=lambda done: machinery_failed(done.outcome)):
            under_way -= 1
            if done.is_doubted and done.request.config not in repeated:
                repeated.add(done.request.config)
                requests = itertools.chain([done.request], requests)
                continue
            if not machinery_failed(done.outcome):
                failures = 0
                yield done
                continue
            failures += 1
            if failures >= MACHINERY_FAILURES:
                raise EnvironmentLacks(
                    f"{failures} trials in a row have failed through no fault of their configs, the last: "
                    f"{done.outcome.reason}",
                    remedy="fix that, and run the same command: it resumes from here",
                )


def _probed(request: SearchRequest, plan: Plan) -> dict[str, Any]:
    """A probe of the device, taken before the first trial, as a field of the header; none where the device is not in
    this machine or cannot be probed."""
    job = plan.job
    if request.ray_address is not None or not is_detected(job.hardware):
        return {}
    try:
        return {"probe": undisturbed_probe(job.model, job.hardware, job.stack).to_json()}
    except EnvironmentLacks as error:
        _log.warning("autofit: recording without a probe: %s", error)
        return {}


def _continued(
    file: Path, header: dict[str, Any], hardware: Hardware, probed: Callable[[], dict[str, Any]]
) -> dict[tuple[int, Config], Outcome]:
    """The outcomes that `file` already holds of the same recording, by pass and config; a file that is empty, or was
    left while this header was being written, gets the header, with what `probed` gives."""
    begun = {"schema": table_file.SCHEMA, **header}
    text, there = json.dumps(begun)[:-1].encode(), file.read_bytes()
    if text.startswith(there) or (there.startswith(text) and b"\n" not in there):
        os.truncate(file, 0)
        table_file.append(file, {**begun, "recorded_at": now(), **probed()})
        return {}
    known = table_file.read(file)
    # Another machine with the same device may have more host memory.
    for name in table_file.SAME:
        if known.header[name] != header[name] and (name != "hardware" or known.hardware.key != hardware.key):
            raise UsageError(f"{file} is a recording with another {name.replace('_', ' ')}: give another --out")
    table_file.drop_torn_line(file)
    return {(row.number, row.config): row.outcome for row in known.rows}
