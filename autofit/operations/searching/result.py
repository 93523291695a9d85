"""What a search answers: the recommendation and what explains it, or an error that says why there is none."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autofit.core.device.probe_findings import slow_formats
from autofit.core.document import Document
from autofit.core.errors import EnvironmentLacks, Shortfall
from autofit.core.frontier import Frontier, Recommendation, least_practical_speed
from autofit.core.lattice import Config
from autofit.core.outcome import Crashed, Diverged, Fits, OutOfMemory, TimedOut, Trial, context_keys
from autofit.core.units import format_bytes, format_duration
from autofit.core.workload import METHODS
from autofit.operations.recommendation import read_off, shortfall
from autofit.planning.nothing_fits import levers, of_failures
from autofit.planning.plan import Plan
from autofit.prediction.probing import stored_probe
from autofit.store import Store
from autofit.techniques import Job
from autofit.techniques.axes.precision import product_format

if TYPE_CHECKING:
    # Imported where it is used: Optuna takes a quarter of a second, which an answer from the store need not wait for.
    from autofit.search.lattice_state import LatticeState
    from autofit.search.loop import SearchLoop

SOONER = "what would help: a longer --time-budget, or a smaller --global-batch or --seq-len"
"""For when trials take longer than there is time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbed(Document):
    """The trials of a search whose device was busy with something else, or throttled."""

    repeated: int = 0
    """Trials after which their config was run again."""
    believed: int = 0
    """Configs that count as measured by such a trial, because the device was no better when they were run again."""
    reason: str = ""
    """What disturbed the last of them; empty if there was none."""
    set_aside: int = 0
    """Trials that do not count, because they ran on a node of a cluster that is slower than its type."""
    slow_nodes: tuple[str, ...] = ()
    """A sentence for each of those nodes."""

    @classmethod
    def of(cls, trials: Sequence[Trial], settled: Iterable[Trial], slow_nodes: Iterable[str] = ()) -> Disturbed:
        """From all `trials` of the search, oldest first, of which `settled` count, and this driver's `slow_nodes`."""
        aside = [trial.why_set_aside for trial in trials if trial.why_set_aside]
        doubted = [trial for trial in trials if trial.doubts and not trial.why_set_aside]
        last = {trial.config: trial.trial_id for trial in trials}
        return cls(
            repeated=sum(trial.trial_id != last[trial.config] for trial in doubted),
            believed=sum(bool(trial.doubts) for trial in settled),
            reason=doubted[-1].doubts[0] if doubted else "",
            set_aside=len(aside),
            slow_nodes=tuple(dict.fromkeys((*aside, *slow_nodes))),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult(Document):
    """How a search ended."""

    search_id: str
    recommendation: Recommendation
    frontier: Frontier
    trials: int
    """Trials that this search ran, verification included."""
    out_of_memory: int
    ruled_out: int
    answered_from_store: int
    seconds: float
    stopped_because: str
    regret_bound: float | None = None
    """Upper bound, with 95 % confidence, on how much slower the recommended config is than the best of its method."""
    disturbed: Disturbed = field(default_factory=Disturbed)
    emulated: tuple[str, ...] = ()
    """What a probe says of those of the search's number formats that are slower than fp32, a sentence each."""
    unsupported: Mapping[str, int] = field(default_factory=dict)
    """Reason -> number of configs of the space that were left out because they cannot work here."""
    beyond_goal: int = 0
    """Number of configs that were left out because they change more than the user allows."""
    impractical: tuple[str, ...] = ()
    """A sentence for each more faithful method than the recommended one whose trials were all ended as too slow."""

    @classmethod
    def of(cls, loop: SearchLoop, store: Store, search_id: str, started: float) -> SearchResult:
        """From a loop that has ended; the search began at `started`, by `time.monotonic`. Raises as `search` does."""
        plan = loop.plan
        job = plan.job
        trials: list[Trial] = list(loop.state.trials.values())
        _check_any_is_measured(loop)
        if not trials:
            _check_any_could_run(loop)
        every = store.trials(search_id=search_id)
        _check_any_is_of_its_type(trials, every)
        _check_any_fits(trials or every, plan)
        # Counted as `frontier` counts them: every attempt of this hardware, stack and workload.
        context = context_keys(job.hardware, job.stack, job.workload)
        frontier = Frontier.of(
            loop.state.measured(),
            hardware=job.hardware,
            workload=job.workload,
            stack=job.stack,
            trials=store.count(**context),
            out_of_memory=store.count(**context, outcome=OutOfMemory.kind),
            contradictory=loop.state.contradictory,
        )
        formats = slow_formats_used(job, plan.lattice.configs, store)
        limit = plan.limits.memory_bytes
        recommended = read_off(frontier, memory_limit_bytes=limit, goal=plan.goal)
        if recommended is None:
            raise shortfall(frontier, limit, plan.goal, trials)
        return cls(
            search_id=search_id,
            recommendation=recommended,
            frontier=frontier,
            trials=loop.progress.done,
            out_of_memory=loop.progress.out_of_memory,
            ruled_out=loop.progress.ruled_out,
            answered_from_store=loop.progress.from_store,
            seconds=time.monotonic() - started,
            stopped_because=loop.progress.stopped_because,
            regret_bound=loop.progress.regret_bound,
            disturbed=Disturbed.of(every, trials, loop.progress.slow_nodes),
            emulated=tuple(formats.values()),
            unsupported=plan.unsupported,
            beyond_goal=plan.beyond_goal,
            impractical=impractical_methods(
                loop.state,
                recommended=recommended.point.method,
                tokens_per_step=job.workload.tokens_per_step,
                slow=formats,
            ),
        )


def _check_any_is_measured(loop: SearchLoop) -> None:
    """Raise an error if trials were too slow to be finished, and nothing else has shown a config that fits."""
    bounds, ran_out = loop.state.least_step_seconds, loop.state.out_of_memory
    if not bounds or loop.state.points():
        return
    config, least = min(bounds.items(), key=lambda item: item[1])
    reason = f"a step takes at least {format_duration(least)} with {config}"
    reason += f"; {ran_out} configs ran out of memory" if ran_out else ""
    raise Shortfall(
        f"no trial could be finished in the time: {reason}; {SOONER}",
        memory_limit_bytes=loop.plan.limits.memory_bytes,
        closest={"config": config.to_json(), "provenance": "measured", "least_step_seconds": least},
    )


def _check_any_could_run(loop: SearchLoop) -> None:
    """Raise an error if nothing could run: the host is too small for any config, or the time budget too short."""
    plan = loop.plan
    if not loop.state.open:
        if not loop.beyond_host:
            return
        config, lacking = min(loop.beyond_host.items(), key=lambda item: item[1])
        host_bytes = plan.job.hardware.host_memory_bytes
        raise Shortfall(
            f"no config of {plan.job.model.name} is predicted to fit: the one that needs the least host memory needs "
            f"{format_bytes(host_bytes + lacking)}, and a machine has {format_bytes(host_bytes)} ({config})",
            memory_limit_bytes=plan.limits.memory_bytes,
            closest={"config": config.to_json(), "provenance": "predicted", "over_limit_bytes": lacking},
        )
    if loop.kept_waiting is not None:
        raise EnvironmentLacks(
            f"no trial was run: {loop.kept_waiting}",
            remedy="let the other trial or search end first, or give this one a longer --time-budget",
        )
    budget, quickest = plan.limits.seconds, loop.quickest()
    if budget is not None and quickest is not None:
        takes = format_duration(quickest.expected_seconds)
        what = "no trial ended in its time" if loop.progress.done else "no trial was run"
        raise EnvironmentLacks(
            f"{what}: the quickest that may fit is expected to take {takes}, which is more than predicting and trials "
            f"left of the time budget of {format_duration(budget)} ({quickest.config})",
            remedy=SOONER,
        )


def _check_any_is_of_its_type(settled: Sequence[Trial], every: Iterable[Trial]) -> None:
    """Raise `EnvironmentLacks` where all that fitted ran on nodes that are slower than their type."""
    aside = [trial for trial in every if trial.why_set_aside and isinstance(trial.outcome, Fits)]
    if aside and not any(isinstance(trial.outcome, Fits) for trial in settled):
        raise EnvironmentLacks(
            f"all {len(aside)} trials that fitted ran where {aside[-1].why_set_aside}",
            remedy="mend or remove that node and run the same command again, with more --max-trials or --time-budget",
        )


def _check_any_fits(trials: list[Trial], plan: Plan) -> None:
    """If no trial has fitted and some failed for a reason other than memory, raise an error that says what failed."""
    failed = [t.outcome for t in trials if isinstance(t.outcome, Crashed | TimedOut | Diverged)]
    if not failed or any(isinstance(t.outcome, Fits) for t in trials):
        return
    last = failed[-1]
    message = (
        f"no trial has fitted, and {len(failed)} of {len(trials)} failed for reasons other than memory, the last: "
        f"{last.kind.replace('_', ' ')}: {' '.join(last.reason.split())}"
    )
    if all(isinstance(t.outcome, Crashed) for t in trials):
        raise EnvironmentLacks(message, remedy="autofit doctor, and --fresh to try them again")
    limit, job = plan.limits.memory_bytes, plan.job
    closest = of_failures(trials, limit)
    if len(failed) < len(trials):
        helpful = levers(plan.goal, job.workload, job.hardware, beyond_bytes=closest.beyond_bytes)
        message += f"; {closest.text}; {helpful}"
    hung = all(isinstance(outcome, TimedOut) for outcome in failed)
    help_ = SOONER if hung else "`autofit doctor` may say more"
    raise Shortfall(f"{message}; {help_}", memory_limit_bytes=limit, closest=closest.document)


def impractical_methods(
    state: LatticeState, *, recommended: str, tokens_per_step: int, slow: Mapping[str, str]
) -> tuple[str, ...]:
    """A sentence for each more faithful method than the `recommended` one whose trials were all ended as too slow. What
    a first micro-step alone shows is not proven: it may have generated kernels."""
    measured = state.fastest(METHODS)
    speeds = {method: point.measurement.tokens_per_second for method, point in measured.items()}
    proven = state.proven_step_seconds
    bounds = state.least_step_seconds | proven
    fastest: dict[str, Config] = {}
    for config in sorted(bounds, key=bounds.__getitem__):
        fastest.setdefault(config.text("method"), config)
    sentences = []
    for method in METHODS[: METHODS.index(recommended)]:
        if method in fastest and method not in measured:
            config = fastest[method]
            format_ = product_format(config)
            why = f", because {format_} is slow here" if format_ in slow else ""
            most = tokens_per_step / bounds[config]
            practical = least_practical_speed(method, speeds)
            too_slow = "is too slow to be practical" if config in proven else "seems too slow to be practical"
            what = too_slow if most < practical else "was begun and not finished in its time"
            judged = "" if config in proven else ", by its first micro-step alone"
            sentences.append(f"{method} {what}: at most {most:,.3g} tokens/s{judged}{why} ({config})")
    return tuple(sentences)


def slow_formats_used(job: Job, configs: Iterable[Config], store: Store) -> dict[str, str]:
    """A probe's sentence for each number format that these configs use and that is slower than fp32."""
    probe = stored_probe(job.hardware, job.stack, store, job.model.digest)
    used = {product_format(config) for config in configs}
    return {} if probe is None else {name: why for name, why in slow_formats(probe).items() if name in used}
