"""A world to search in: memory and speed of every config of a real lattice by formula, and workers that look them up.

The formulas stand in for the device only. A speed is a product of the axes' effects, with a part that no such product
explains, which a search must cope with; memory never contradicts the lattice's order, on which a search may rely.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from unit.operations import made_trials
from unit.operations.made_trials import fits, make_trial

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.device.probe import Probe
from autofit.core.frontier import Point
from autofit.core.lattice import Config, Lattice
from autofit.core.outcome import Fits, Outcome, OutOfMemory, StepSeconds, Trial
from autofit.core.prediction import Prediction
from autofit.core.units import GIB
from autofit.core.verdict import verdict
from autofit.core.workload import METHODS, Goal, Workload
from autofit.planning.lattices import load_space, narrow
from autofit.planning.plan import Limits, Plan
from autofit.prediction.predictions import Predictions, ReadyMade
from autofit.search.lattice_state import LatticeState
from autofit.search.loop import SearchLoop
from autofit.search.progress import Progress
from autofit.store.trial_log import TrialLog
from autofit.techniques import Job, unsupported
from autofit.trial.attempt import Attempt
from autofit.trial.request import TrialRequest
from autofit.workers.pool import Completed

PARAMETERS = 135e6
WEIGHT_BYTES = {"qlora": 0.8, "lora": 2.1, "full": 4.0}
"""Per parameter: weights and gradients in 16 bits; adapters add next to nothing."""
STATE_BYTES = {"adamw-8bit": 2.0, "adamw": 4.0}
ACTIVATIONS = {"full": 0.25, "every-2": 0.5, "selective": 0.6, "none": 1.0}
LOSSES = {"chunked": 0.6, "full": 1.0}
PRECISIONS = {"bf16": (-0.1, 0.1), "bf16-mixed": (0.0, 0.3), "fp32": (0.2, 0.9)}
"""Bounds between which a precision's effect on the logarithm of the step time is drawn."""
WIDTHS = {"bf16": 1.0, "bf16-mixed": 1.25, "fp32": 1.9}
WITHIN_TIES = 0.04
"""Speeds whose spreads of 2 % overlap are ties, of which the lightest or plainest wins, and each of two runs errs by
1 %: the recommendation may be slower than the best by both together."""


def make_job(hardware: Hardware, stack: Stack, *, model: Any, global_batch: int = 4) -> Job:
    """A job of any model on any site."""
    workload = Workload(model=model.name, model_digest=model.digest, seq_len=128, global_batch=global_batch)
    return Job(model=model, workload=workload, hardware=hardware, stack=stack)


def plan_of(state: LatticeState, **changes: Any) -> Plan:
    """A plan that may have led to a state: of any job, without limits but the memory's, and with no least memory."""
    plan = Plan(
        job=made_trials.make_job(),
        lattice=state.lattice,
        lower_bounds=dict.fromkeys(state.lattice.configs, 0),
        goal=Goal(),
        limits=Limits(memory_bytes=state.memory_limit_bytes),
    )
    return replace(plan, **changes)


def with_spread(outcome: Fits, spread: float | None) -> Fits:
    """The same, whose steps had this relative spread."""
    m = outcome.measurement
    return Fits(measurement=replace(m, step_seconds=replace(m.step_seconds, relative_spread=spread)))


def predicted(device_bytes: float, seconds: float | None = 1.0, *, error: float = 0.5) -> Prediction:
    """What a config of this memory and step time is predicted to take; `error` is that stated of its time."""
    return Prediction(
        peak_allocated_bytes=int(0.9 * device_bytes),
        device_bytes=int(device_bytes),
        step_seconds=seconds,
        calibrated_on=0,
        relative_error=None if seconds is None else error,
        work=made_trials.WORK,
    )


def cpu_lattice(job: Job, goal: Goal | None = None) -> Lattice:
    """The lattice of the built-in space `cpu`, on a processor: a GPU would take another attention in fp32."""
    processor = replace(job.hardware, kind="cpu")
    return narrow(load_space("cpu"), goal or Goal(), replace(job, hardware=processor)).lattice


@dataclass(frozen=True)
class Truth:
    """Memory and step time of every config, without a device."""

    job: Job
    lattice: Lattice
    seed: int
    noise: float = 0.01
    """Standard deviation of the logarithm of a measured step time."""
    surprises: Mapping[tuple[str, object], float] = field(default_factory=dict)
    """Effects that nobody would expect: (axis, value) to the logarithm of a factor on the step time."""

    def uncertain(self, *parts: object) -> random.Random:
        """A random generator of its own for everything that has a name."""
        text = "|".join(map(str, (self.seed, *parts)))
        return random.Random(hashlib.sha256(text.encode()).digest())

    def effect(self, axis: str, value: object, low: float, high: float) -> float:
        """The logarithm of the factor by which a value changes the step time, drawn once for this world."""
        drawn = self.uncertain(axis, value).uniform(low, high)
        return self.surprises.get((axis, value), drawn)

    def floor(self, config: Config) -> int:
        """Bytes of weights, gradients and states, which a search knows beforehand."""
        wide = 1.0 if config["precision"] == "bf16" or config["method"] != "full" else 1.6
        states = STATE_BYTES[config.text("optimizer")] if config["method"] == "full" else 0.0
        return int(PARAMETERS * (WEIGHT_BYTES[config.text("method")] * wide + states))

    @cached_property
    def lower_bounds(self) -> dict[Config, int]:
        """`floor` of every config."""
        return {config: self.floor(config) for config in self.lattice.configs}

    def memory(self, config: Config) -> int:
        """Peak bytes: the floor and the activations."""
        scale = math.exp(self.effect("memory", "all", -0.3, 0.3))
        share = ACTIVATIONS[config.text("checkpointing")] * LOSSES[config.text("loss")]
        share *= WIDTHS[config.text("precision")] * config.number("micro_batch") ** 0.9
        adapters = {"qlora": 1.05, "lora": 1.1, "full": 1.0}[config.text("method")]
        return self.floor(config) + int(0.35 * GIB * scale * share * adapters)

    def seconds(self, config: Config) -> float:
        """The true seconds of a step."""
        logarithm = self.effect("time", "all", -0.2, 0.2)
        logarithm += {"full": 0.28, "every-2": 0.15, "selective": 0.12, "none": 0.0}[config.text("checkpointing")]
        logarithm += self.effect("checkpointing", config["checkpointing"], -0.03, 0.03)
        logarithm += self.effect("precision", config["precision"], *PRECISIONS[config.text("precision")])
        logarithm += self.effect("method", config["method"], -0.3, 0.3)
        logarithm += self.effect("optimizer", config["optimizer"], 0.0, 0.2)
        logarithm += self.effect("loss", config["loss"], -0.03, 0.06)
        logarithm -= self.effect("micro_batch", "doubling", 0.0, 0.15) * math.log2(config.number("micro_batch"))
        # What no product of effects explains.
        logarithm += self.uncertain("interaction", config["precision"], config["micro_batch"]).gauss(0, 0.03)
        return math.exp(logarithm) * self.job.workload.tokens_per_step / 300.0

    def measured(self, config: Config, attempt: int) -> Fits:
        """What one run of a config that fits shows."""
        seconds = self.seconds(config) * math.exp(self.uncertain("run", config, attempt).gauss(0, self.noise))
        outcome = fits(self.memory(config) / GIB, self.job.workload.tokens_per_step / seconds)
        steps = StepSeconds(median=seconds, p95=1.01 * seconds, relative_spread=0.02)
        return Fits(measurement=replace(outcome.measurement, step_seconds=steps, device_bytes=self.memory(config)))

    def outcome(self, config: Config, limit: int, attempt: int = 0) -> Outcome:
        """How a run ends under a limit."""
        if self.memory(config) > limit:
            return OutOfMemory(reason="the allocation failed", phase="backward", requested_bytes=1)
        return self.measured(config, attempt)

    def trial(self, config: Config, limit: int, attempt: int = 0) -> Trial:
        """A run, as a stored trial."""
        return make_trial(config, self.outcome(config, limit, attempt), job=self.job, limit=limit)

    def best(self, limit: int, methods: Sequence[str] = METHODS) -> Config | None:
        """The fastest config that fits, of the most faithful method that has one."""
        for method in methods:
            fitting = [c for c in self.lattice.configs if c["method"] == method and self.memory(c) <= limit]
            if fitting:
                return min(fitting, key=self.seconds)
        return None


@dataclass
class FakePool:
    """Workers that look outcomes up; a trial takes no time, except on a clock that the test supplies."""

    truth: Truth
    size: int = 1
    special: Callable[[TrialRequest], Outcome | None] = lambda request: None
    """An outcome other than the truth's."""
    on_wait: Callable[[], None] = lambda: None
    seconds: float = 5.0
    """What every trial reports to have taken."""
    other_site: tuple[Hardware, Stack] | None = None
    """A site other than the job's own."""
    checks: list[Callable[[TrialRequest], None]] = field(default_factory=list)
    """Called with every request before it is accepted."""
    submitted: list[TrialRequest] = field(default_factory=list)
    returned: int = 0
    waits: int = 0
    closed: int = 0
    claims: list[tuple[str, int]] = field(default_factory=list)
    set_aside: dict[str, str] = field(default_factory=dict)
    most_at_once: int = 0
    _running: list[TrialRequest] = field(default_factory=list)

    def site(self) -> tuple[Hardware, Stack]:
        """The job's own site, if no other is given."""
        return self.other_site or (self.truth.job.hardware, self.truth.job.stack)

    def cannot(self, config: Config, job: Job) -> str | None:
        """Only what the job itself does not support; the site lacks nothing."""
        return unsupported(config, job)

    def claim(self, search_id: str, epoch: int, usual: Probe | None = None) -> None:
        """Note it: there are no other drivers."""
        self.claims.append((search_id, epoch))

    def leave_out(self, worker: str, reason: str) -> bool:
        """There is no other."""
        return False

    def submit(self, request: TrialRequest) -> None:
        """Take a request."""
        assert not self.closed
        for check in self.checks:
            check(request)
        self.submitted.append(request)
        self._running.append(request)
        assert len(self._running) <= self.size
        self.most_at_once = max(self.most_at_once, len(self._running))

    def wait(self, timeout: float) -> list[Completed]:
        """Any one of the running trials, or none yet."""
        self.on_wait()
        self.waits += 1
        order = self.truth.uncertain("order", self.waits)
        if not self._running or order.random() < 0.1:
            return []
        request = self._running.pop(order.randrange(len(self._running)))
        self.returned += 1
        outcome = self.special(request)
        if outcome is None:
            attempt = sum(r.config == request.config for r in self.submitted)
            outcome = self.truth.outcome(request.config, request.memory_limit_bytes, attempt)
        return [(request, Attempt(outcome=outcome, seconds=self.seconds))]

    def close(self) -> None:
        """Count the calls."""
        self.closed += 1


@dataclass
class KeptTrials:
    """Where a scheduler's trials go without a search: they stay as they are."""

    trials: list[Trial] = field(default_factory=list)

    def keep(self, trial: Trial) -> Trial:
        self.trials.append(trial)
        return trial

    def set_aside(self, trial: Trial, reason: str) -> None:
        """It would count no longer."""

    def show(self) -> None:
        """Nobody looks."""


class RememberingLog(TrialLog):
    """A store in memory."""

    def __init__(self, earlier: dict[Config, list[Trial]]) -> None:
        self._earlier = earlier
        self.saved: list[Trial] = []

    def attempts(self, job: Job) -> dict[Config, list[Trial]]:
        return self._earlier

    def keep(self, trial: Trial) -> Trial:
        """Give a trial its number."""
        self.saved.append(replace(trial, trial_id=len(self.saved) + 1))
        return self.saved[-1]


@dataclass
class Run:
    """A search over a world, with everything that it leaves behind."""

    truth: Truth
    limit: int
    pool: FakePool
    search: SearchLoop
    log: RememberingLog
    opened: int = 0
    reports: list[tuple[int, int, int, bool]] = field(default_factory=list)
    """Of each report: trials done, out of memory, ruled out, verifying."""
    unknown: list[int] = field(default_factory=list)
    """Of each report: how many saved configs the search did not know the outcome of."""

    @property
    def saved(self) -> list[Trial]:
        return self.log.saved

    @property
    def progress(self) -> Progress:
        return self.search.progress

    @property
    def winner(self) -> Point:
        """What the search recommends, which must be something."""
        winner = self.search.winner()
        assert winner is not None
        return winner

    @property
    def regret(self) -> float:
        """How much longer the winner's step truly takes than that of the best config; 0.01 is 1 %."""
        winner, best = self.winner, self.truth.best(self.limit, self.search.plan.goal.methods)
        assert best is not None
        if winner.method != best["method"]:
            return math.inf
        return self.truth.seconds(winner.config) / self.truth.seconds(best) - 1.0

    def attempts(self) -> dict[Config, list[Trial]]:
        """What a store would have of it."""
        grouped: dict[Config, list[Trial]] = {}
        for trial in self.saved:
            grouped.setdefault(trial.config, []).append(trial)
        return grouped


def prepare(
    truth: Truth,
    limit: int,
    *,
    size: int = 1,
    earlier: dict[Config, list[Trial]] | None = None,
    methods: tuple[str, ...] = METHODS,
    max_trials: int | None = None,
    seconds: float | None = None,
    special: Callable[[TrialRequest], Outcome | None] = lambda request: None,
    on_wait: Callable[[], None] = lambda: None,
    lattice: Lattice | None = None,
    predictions: Predictions | None = None,
    thorough: bool = False,
) -> Run:
    """A search that is ready to run, whose pool checks that it keeps its promises."""
    pool = FakePool(truth, size=size, special=special, on_wait=on_wait)
    log = RememberingLog(earlier or {})

    def open_pool() -> FakePool:
        run.opened += 1
        return pool

    def report(progress: Progress) -> None:
        run.reports.append((progress.done, progress.out_of_memory, progress.ruled_out, progress.verifying))
        run.unknown.append(len({t.config for t in run.saved} - search.state.trials.keys()))

    walked = lattice or truth.lattice
    search = SearchLoop(
        plan=Plan(
            job=truth.job,
            lattice=walked,
            lower_bounds={config: truth.floor(config) for config in walked.configs},
            goal=Goal(method="any" if methods == METHODS else methods[0]),
            limits=Limits(memory_bytes=limit, max_trials=max_trials, seconds=seconds),
            thorough=thorough,
        ),
        predictor=ReadyMade(predictions or Predictions()),
        log=log,
        open_pool=open_pool,
        report=report,
    )
    run = Run(truth, limit, pool, search, log)

    def keeps_promises(request: TrialRequest) -> None:
        assert len(run.saved) == pool.returned, "a trial was asked for before the last outcomes were stored"
        assert request.config not in search.state.ruled_out, "a ruled-out config is run"
        assert request.memory_limit_bytes == limit
        if not search.progress.verifying:
            again = [r for r in pool.submitted if r.config == request.config]
            assert not again, "a config is run twice"
            answer = verdict((earlier or {}).get(request.config, ()), limit)
            assert answer is None, "the store has the answer"

    pool.checks.append(keeps_promises)
    return run
