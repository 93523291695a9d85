"""The search loop over worlds whose truth is known: what it finds, what it runs for it, and how it ends."""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.operations.made_trials import crashed, make_job, make_trial, out_of_memory
from unit.search.made_truth import WITHIN_TIES, FakePool, KeptTrials, Run, Truth, cpu_lattice, prepare

from autofit.catalog.models import Model
from autofit.core.errors import EnvironmentLacks
from autofit.core.frontier import PRACTICAL
from autofit.core.lattice import Config, Lattice
from autofit.core.outcome import Crashed, Diverged, Fits, Outcome, OutOfMemory, TimedOut
from autofit.core.units import GIB
from autofit.core.workload import METHODS
from autofit.search import budget
from autofit.search.budget import Limits
from autofit.search.failures import MACHINERY_FAILURES
from autofit.search.lattice_state import answers
from autofit.search.scheduler import Scheduler
from autofit.trial.machine.device_lock import NOT_BEGUN
from autofit.trial.request import TrialRequest
from autofit.workers.pool import Completed

NO_GAIN = "no untried config is worth its trial: it would have to promise "
LATTICE = cpu_lattice(make_job())
SEEDS = range(3)
WORLDS = range(7)
"""With three limits each, one more than the twenty of which nineteen must hold."""
SHARES = (0.15, 0.5, 0.9)
"""Of the configs, how many fit: few full fine-tunings, about half of all, nearly all."""


class WaitingPool(FakePool):
    """Trials that wait for their device, and are killed at what is then left of their deadline."""

    waited = 0.0

    def wait(self, timeout: float) -> list[Completed]:
        """As workers do."""
        completed = []
        for request, attempt in super().wait(timeout):
            ran = request.after_waiting(self.waited)
            late = TimedOut(reason="killed", deadline_seconds=ran.deadline_seconds)
            completed.append((request, replace(attempt, outcome=late, waited_seconds=self.waited)))
        return completed


def limit_for(truth: Truth, share: float) -> int:
    """The memory limit under which this share of the configs fits."""
    memory = sorted(truth.memory(c) for c in truth.lattice.configs)
    return memory[int(share * len(memory))]


def searched(truth: Truth, share: float = 0.5, **options: object) -> Run:
    run = prepare(truth, limit_for(truth, share), **options)  # type: ignore[arg-type]
    run.search.run()
    return run


@cache
def of_world(seed: int, share: float) -> Run:
    """The search of one world, which several tests judge."""
    return searched(Truth(make_job(), LATTICE, seed), share)


def check_counts(run: Run) -> None:
    """The counts are those of what happened, and every config is in one state."""
    progress, state = run.progress, run.search.state
    outcomes = [trial.outcome for trial in run.saved]
    assert progress.done == len(outcomes) == len(run.pool.submitted)
    assert progress.out_of_memory == sum(isinstance(o, OutOfMemory) for o in outcomes)
    assert progress.failed == sum(not isinstance(o, Fits | OutOfMemory) for o in outcomes)
    assert progress.ruled_out == len(state.ruled_out)
    assert progress.candidates == len(run.search.plan.lattice.configs)
    measured, ruled_out, still_open = set(state.trials), set(state.ruled_out), set(state.open)
    assert not measured & ruled_out and not measured & still_open and not ruled_out & still_open
    assert measured | ruled_out | still_open == set(run.search.plan.lattice.configs)
    assert progress.stopped_because
    assert progress.running == () and progress.best == run.search.winner()
    assert run.reports[-1] == (progress.done, progress.out_of_memory, progress.ruled_out, False)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("share", SHARES)
def test_the_best_that_fits_is_found(seed: int, share: float) -> None:
    run = of_world(seed, share)
    assert run.regret < WITHIN_TIES
    assert run.progress.done < 40
    assert run.progress.stopped_because.startswith(NO_GAIN)
    assert run.progress.stopped_because.endswith(" more speed, or 10% where it may not fit")
    check_counts(run)


def test_what_is_reported_includes_every_trial_that_has_ended(lattice: Lattice) -> None:
    run = searched(Truth(make_job(), lattice, seed=1), size=3)
    assert len(run.unknown) > run.progress.done and not any(run.unknown)


def test_the_stated_regret_holds_in_nineteen_of_twenty_worlds() -> None:
    bounds, held = [], []
    for seed in WORLDS:
        for share in SHARES:
            run = of_world(seed, share)
            assert run.progress.regret_bound is not None
            bounds.append(run.progress.regret_bound)
            held.append(run.regret <= run.progress.regret_bound)
    assert sum(held) >= 0.95 * len(held)
    assert statistics.median(bounds) < 0.15, "a bound that says nothing always holds"


def test_a_thorough_search_goes_on_until_everything_is_known(lattice: Lattice) -> None:
    truth = Truth(make_job(), lattice, seed=1)
    quick, thorough = searched(truth), searched(truth, thorough=True)
    assert thorough.progress.stopped_because.startswith("every config is measured or ruled out")
    assert thorough.progress.done > quick.progress.done
    fitting = {c for c in lattice.configs if truth.memory(c) <= thorough.limit}
    state = thorough.search.state
    assert {p.config for p in state.points()} == fitting - state.ruled_out.keys() - set(state.open)
    ran = Counter(r.config for r in thorough.pool.submitted)
    assert sum(count > 1 for count in ran.values()) <= 6, "not everything runs twice"


def test_a_thorough_search_ends_at_its_limits(lattice: Lattice) -> None:
    run = searched(Truth(make_job(), lattice, seed=1), thorough=True, max_trials=15)
    assert run.progress.done == 15
    ended = r"the trial limit is reached, with \d+ configs untried \(give a larger --max-trials\)"
    assert re.fullmatch(ended, run.progress.stopped_because)
    assert run.pool.submitted[-1].config in [r.config for r in run.pool.submitted[:-1]], "the last verifies the winner"


def test_on_average_the_best_is_found_to_half_a_percent() -> None:
    regrets = [of_world(seed, share).regret for seed in WORLDS for share in SHARES]
    assert sum(regrets) / len(regrets) < 0.005


SURPRISES: Mapping[str, Mapping[tuple[str, object], float]] = {
    "bf16 is emulated, and fp32 twice as fast": {("precision", "fp32"): -0.7},
    "mixed precision is fast": {("precision", "bf16-mixed"): -0.5},
    "a larger micro-batch is slower": {("micro_batch", "doubling"): -0.3},
    "chunking the loss is slow": {("loss", "chunked"): 0.5},
    "8-bit states are fast": {("optimizer", "adamw-8bit"): -0.5},
    "8-bit states are slow": {("optimizer", "adamw-8bit"): 1.0},
    "checkpointing costs nothing": {("checkpointing", "full"): -0.28},
}


@pytest.mark.parametrize("surprise", SURPRISES)
def test_a_machine_that_is_not_as_expected_is_understood(lattice: Lattice, surprise: str) -> None:
    """What a practitioner would start from only steers: it must not hide what is twice as fast."""
    runs = [searched(Truth(make_job(), lattice, seed, surprises=SURPRISES[surprise]), 0.9) for seed in range(2)]
    assert max(run.regret for run in runs) < 0.06


@pytest.mark.parametrize("size", [1, 3])
def test_the_promises_hold_with_several_workers(lattice: Lattice, size: int) -> None:
    for seed in range(3):
        run = searched(Truth(make_job(), lattice, seed), size=size)
        assert run.pool.most_at_once == size
        assert run.regret < WITHIN_TIES
        assert (run.opened, run.pool.closed) == (1, 1)
        check_counts(run)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    share=st.floats(0.0, 0.99),
    size=st.integers(1, 4),
    failures=st.sampled_from([0.0, 0.2, 0.6]),
    max_trials=st.one_of(st.none(), st.integers(1, 30)),
)
def test_in_every_world_the_promises_hold(
    seed: int, share: float, size: int, failures: float, max_trials: int | None
) -> None:
    truth = Truth(make_job(), LATTICE, seed)
    run = prepare(truth, limit_for(truth, share), size=size, max_trials=max_trials or 80)
    run.pool.special = failing(run, failures)
    run.search.run()
    check_counts(run)
    assert run.pool.closed == 1
    # Nothing that fits was ruled out.
    assert all(truth.memory(c) > run.limit for c in run.search.state.ruled_out)
    counts = [report[:3] for report in run.reports]
    assert all(all(a <= b for a, b in zip(x, y, strict=True)) for x, y in itertools.pairwise(counts))


def failing(run: Run, share: float) -> Callable[[TrialRequest], Outcome | None]:
    """Some trials fail in every way there is but out of memory."""

    def special(request: TrialRequest) -> Outcome | None:
        draw = run.truth.uncertain("failure", request.config)
        if draw.random() >= share:
            return None
        return draw.choice(
            [
                crashed(),
                TimedOut(reason="no end within 600 s", deadline_seconds=600.0),
                Diverged(reason="the loss is not finite", losses=(10.8, None)),
            ]
        )

    return special


def test_a_worker_that_comes_up_gets_a_trial_at_once(truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for the trials of the others to end."""
    run = prepare(truth, limit_for(truth, 0.5))
    usual = run.pool.wait

    def wait(timeout: float) -> list[Completed]:
        if run.pool.size == 1:
            run.pool.size = 2
            return []
        assert run.pool.most_at_once == 2
        return usual(timeout)

    monkeypatch.setattr(run.pool, "wait", wait)
    run.search.run()


def test_crashes_time_outs_and_divergence_do_not_stop_it(truth: Truth) -> None:
    run = prepare(truth, limit_for(truth, 0.5))
    run.pool.special = failing(run, 0.3)
    run.search.run()
    assert run.progress.failed > 0
    assert run.progress.stopped_because.startswith(NO_GAIN)
    failed = {t.config for t in run.saved if not isinstance(t.outcome, Fits | OutOfMemory)}
    fitting = [c for c in truth.lattice.configs if truth.memory(c) <= run.limit and c["method"] == "full"]
    best = min((c for c in fitting if c not in failed), key=truth.seconds)
    assert truth.seconds(run.winner.config) / truth.seconds(best) < 1.05
    check_counts(run)


@pytest.mark.parametrize(("axis", "value"), [("precision", "bf16"), ("checkpointing", "none"), ("optimizer", "adamw")])
def test_a_technique_that_cannot_run_here_does_not_end_it(lattice: Lattice, axis: str, value: str) -> None:
    """The fastest configs all have it: of these worlds, adamw alone would take a dozen crashes."""
    truth = Truth(make_job(), lattice, seed=1)

    def special(request: TrialRequest) -> Outcome | None:
        return crashed() if request.config[axis] == value else None

    run = searched(truth, 0.9, special=special, max_trials=12)
    before = list(itertools.takewhile(lambda trial: not isinstance(trial.outcome, Fits), run.saved))
    assert run.search.winner() is not None and len(before) <= 4, [str(trial.config) for trial in before]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "culprits",
    list(itertools.combinations([("precision", "bf16"), ("checkpointing", "none"), ("optimizer", "adamw")], 2)),
    ids=str,
)
def test_two_techniques_that_cannot_run_here_do_not_end_it(
    lattice: Lattice, culprits: tuple[tuple[str, str], ...], seed: int
) -> None:
    """What has one of them or both crashes, so that after a few crashes no value is common to all."""
    truth = Truth(make_job(), lattice, seed=seed)

    def works(config: Config) -> bool:
        return not any(config[axis] == value for axis, value in culprits)

    run = searched(truth, 0.9, special=lambda request: None if works(request.config) else crashed(), max_trials=24)
    before = list(itertools.takewhile(lambda trial: not isinstance(trial.outcome, Fits), run.saved))
    assert len(before) <= 8, [str(trial.config) for trial in before]
    winner = run.winner
    best = min((c for c in lattice.configs if works(c) and c["method"] == winner.config["method"]), key=truth.seconds)
    assert truth.seconds(winner.config) / truth.seconds(best) < 1.1


def test_a_failure_that_nothing_survives_ends_the_search_soon(truth: Truth) -> None:
    """A broken library crashes every trial: a hundred of them say no more than the first dozen."""
    run = prepare(truth, limit_for(truth, 0.5))
    run.pool.special = lambda request: crashed()
    run.search.run()
    assert run.search.winner() is None
    assert run.progress.done <= 40


def test_where_nothing_fits_it_ends_with_that(truth: Truth) -> None:
    lightest = min(truth.memory(c) for c in truth.lattice.configs)
    run = prepare(truth, lightest - 1)
    run.search.run()
    assert run.search.winner() is None
    assert run.search.state.open == ()
    assert run.progress.stopped_because == "every config is measured or ruled out"
    assert run.progress.done == run.progress.out_of_memory < 40
    check_counts(run)


def test_what_the_floor_excludes_never_runs(truth: Truth) -> None:
    run = searched(truth, 0.15)
    over = {c for c in truth.lattice.configs if truth.floor(c) > run.limit}
    assert over
    assert over <= set(run.search.state.ruled_out)
    assert not over & {r.config for r in run.pool.submitted}


def test_a_lattice_of_one_is_measured_and_verified(truth: Truth) -> None:
    one = Lattice(axes=truth.lattice.axes, configs=(truth.best(10**12) or truth.lattice.configs[0],))
    run = searched(truth, 0.99, lattice=one)
    assert [r.config for r in run.pool.submitted] == [one.configs[0]] * 2
    assert run.progress.stopped_because == "every config is measured or ruled out"


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("max_trials", [1, 2, 5, 8])
def test_the_trials_asked_for_are_the_most_that_run(truth: Truth, max_trials: int, size: int) -> None:
    run = searched(truth, max_trials=max_trials, size=size)
    assert run.progress.stopped_because.startswith("the trial limit is reached")
    assert run.progress.done <= max_trials
    winner = run.winner
    if max_trials > size:
        assert winner.verified, "one trial was kept for the winner"
    check_counts(run)


def explored(run: Run) -> int:
    """How many trials looked at something new."""
    return len({r.config for r in run.pool.submitted})


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time that the search sees."""
    clock = Clock()
    monkeypatch.setattr(budget, "time", clock)
    return clock


OUT_OF_TIME = "no trial is expected to end in the time left"


@pytest.mark.parametrize(
    ("size", "seconds", "ended"),
    [
        (1, 40.0, "the time budget is spent"),
        (1, 62.0, OUT_OF_TIME),
        (3, 25.0, OUT_OF_TIME),
        (3, 32.0, NO_GAIN),
        (3, 40.0, NO_GAIN),
    ],
)
def test_the_time_asked_for_is_kept(truth: Truth, size: int, seconds: float, ended: str, clock: Clock) -> None:
    def pass_time() -> None:
        clock.now += 7.5 / size  # trials take as long as their records say, and one of `size` ends at a time

    run = prepare(truth, limit_for(truth, 0.5), seconds=seconds, size=size, on_wait=pass_time)
    begun: list[tuple[float, float]] = []
    run.pool.checks.append(lambda request: begun.append((clock.now - 1000.0, request.deadline_seconds)))
    run.search.run()
    assert run.progress.stopped_because.startswith(ended)
    assert all(second < seconds and second + deadline <= seconds + 10.0 for second, deadline in begun)
    assert run.winner.verified
    assert clock.now - 1000.0 <= seconds + 10.0


def test_without_a_budget_a_trial_has_its_whole_deadline(truth: Truth) -> None:
    assert {r.deadline_seconds for r in searched(truth).pool.submitted} == {Limits(memory_bytes=1).deadline_seconds}


def test_a_trial_that_the_budget_cuts_off_is_no_verdict(truth: Truth, clock: Clock) -> None:
    run = prepare(truth, limit_for(truth, 0.5), seconds=100.0)

    def too_slow(request: TrialRequest) -> Outcome | None:
        if len(run.pool.submitted) < 4:
            clock.now += 10.0
            return None
        clock.now += request.deadline_seconds
        return TimedOut(reason="killed", deadline_seconds=request.deadline_seconds)

    run.pool.special = too_slow
    run.search.run()
    assert all(isinstance(t.outcome, Fits | OutOfMemory) for t in run.saved[:3])
    # It is stored as what it is: killed after less time than a trial may take.
    cut = run.saved[3]
    assert isinstance(cut.outcome, TimedOut)
    assert cut.outcome.deadline_seconds == run.pool.submitted[3].deadline_seconds < 100.0
    assert run.progress.done == len(run.pool.submitted) == len(run.saved)
    assert "time budget" in run.progress.stopped_because
    # The next search may run it.
    assert cut.config not in run.search.state.trials
    assert cut.config not in answers(run.attempts(), run.search.plan.lattice, run.limit)


@pytest.mark.parametrize("seconds", [40.0, 100.0])
def test_a_verification_that_the_budget_cuts_off_ends_the_search(truth: Truth, clock: Clock, seconds: float) -> None:
    run = prepare(truth, limit_for(truth, 0.5), seconds=seconds)

    def slow_when_verified(request: TrialRequest) -> Outcome | None:
        assert len(run.pool.submitted) < 100, "the search does not end"
        clock.now += 5.0
        if not run.progress.verifying:
            return None
        clock.now += request.deadline_seconds - 5.0
        return TimedOut(reason="killed", deadline_seconds=request.deadline_seconds)

    run.pool.special = slow_when_verified
    run.search.run()
    assert verifications(run) == 1
    assert not run.winner.verified
    check_counts(run)


@pytest.mark.parametrize(("size", "hanging"), [(1, 2), (1, 0), (3, 2)])
def test_a_trial_that_hangs_costs_a_part_of_the_budget_and_is_stored(
    truth: Truth, clock: Clock, size: int, hanging: int
) -> None:
    run = prepare(truth, limit_for(truth, 0.5), seconds=600.0, size=size)
    hung: list[TrialRequest] = []

    def one_hangs(request: TrialRequest) -> Outcome | None:
        clock.now += 5.0
        if len(run.pool.submitted) <= hanging or request is not run.pool.submitted[hanging]:
            return None
        hung.append(request)
        clock.now += request.deadline_seconds - 5.0
        return TimedOut(reason="killed", deadline_seconds=request.deadline_seconds)

    run.pool.special = one_hangs
    run.search.run()
    (request,) = hung
    assert 90.0 <= request.deadline_seconds <= 300.0
    (stored,) = [t for t in run.saved if isinstance(t.outcome, TimedOut)]
    assert run.search.state.trials[request.config] == stored
    assert run.progress.failed == 1
    assert run.winner.verified
    assert run.progress.done > 8, "it goes on after the trial that hung"
    # Who has more time may give the config more.
    assert request.config not in answers(run.attempts(), run.search.plan.lattice, run.limit)
    check_counts(run)


def verifications(run: Run) -> int:
    """How many trials repeated a config."""
    return len(run.pool.submitted) - explored(run)


def test_the_winner_is_run_once_more_without_rivals(truth: Truth) -> None:
    run = searched(truth)
    winner = run.winner
    again = [r for r in run.pool.submitted if r.config == winner.config]
    assert len(again) == 2
    # A rival would let the trial that must confirm stop early.
    assert again[1].rivals == ()
    last = [t for t in run.saved if t.config == winner.config][-1]
    assert isinstance(last.outcome, Fits)
    assert winner.measurement == last.outcome.measurement
    assert winner.trial_id == last.trial_id
    assert any(verifying for *_, verifying in run.reports)


def second_time(run: Run, change: Callable[[Fits], Outcome], times: int = 1) -> None:
    """Change what the first configs that are run a second time show then."""
    changed: set[Config] = set()

    def special(request: TrialRequest) -> Outcome | None:
        repeats = sum(r.config == request.config for r in run.pool.submitted)
        if repeats < 2 or (len(changed) >= times and request.config not in changed):
            return None
        changed.add(request.config)
        return change(run.truth.measured(request.config, repeats))

    run.pool.special = special


def slower(outcome: Fits) -> Fits:
    return Fits(measurement=outcome.measurement.slowed(1.5))


def test_a_winner_that_loses_when_verified_gives_way(truth: Truth) -> None:
    run = prepare(truth, limit_for(truth, 0.5))
    second_time(run, slower)
    run.search.run()
    repeated = [
        r.config for i, r in enumerate(run.pool.submitted) if r.config in [q.config for q in run.pool.submitted[:i]]
    ]
    assert len(repeated) >= 2
    assert repeated[0] != run.winner.config == repeated[-1]
    assert run.regret < 0.1
    check_counts(run)


@pytest.mark.parametrize("outcome", [crashed(), out_of_memory()])
def test_a_winner_that_fails_when_verified_is_not_recommended(truth: Truth, outcome: Outcome) -> None:
    run = prepare(truth, limit_for(truth, 0.5))
    second_time(run, lambda fitted: outcome)
    run.search.run()
    winner = run.search.winner()
    failed = [t.config for t in run.saved if t.outcome == outcome]
    assert winner is not None
    assert failed and winner.config not in failed
    check_counts(run)


def test_every_winner_is_verified_however_many_disappoint(truth: Truth) -> None:
    run = prepare(truth, limit_for(truth, 0.5))
    second_time(run, slower, times=1000)
    run.search.run()
    assert run.winner.verified
    repeated = [config for config, runs in Counter(r.config for r in run.pool.submitted).items() if runs > 1]
    assert len(repeated) == verifications(run), "none is verified twice"


def test_a_trial_that_was_stopped_early_answers_beside_what_beats_it_only(truth: Truth) -> None:
    limit = limit_for(truth, 0.9)
    fitting = [c for c in truth.lattice.configs if c["method"] == "full" and truth.memory(c) <= limit]
    fast = min(fitting, key=truth.seconds)
    slow = max((c for c in fitting if truth.memory(c) > truth.memory(fast)), key=truth.seconds)
    m = truth.measured(slow, 0).measurement
    early = make_trial(slow, Fits(measurement=replace(m, stopped_early=True)), job=truth.job, limit=limit)
    beside = {slow: [early], fast: [truth.trial(fast, limit)]}
    assert list(answers(beside, truth.lattice, limit)) == [c for c in truth.lattice.configs if c in beside]
    without = Lattice(axes=truth.lattice.axes, configs=tuple(c for c in truth.lattice.configs if c != fast))
    assert answers(beside, without, limit) == {}
    # A later failure of what beat it leaves it without a rival too.
    failed = {slow: [early], fast: [truth.trial(fast, limit), make_trial(fast, crashed(), job=truth.job, limit=limit)]}
    assert list(answers(failed, truth.lattice, limit)) == [fast]


def test_rivals_are_what_was_measured_of_the_method(truth: Truth) -> None:
    run = searched(truth)
    fitted: dict[tuple[int, float], str] = {}
    for trial in run.saved:
        if isinstance(trial.outcome, Fits):
            m = trial.outcome.measurement
            fitted[m.device_bytes, m.tokens_per_second] = trial.config.text("method")
    with_rivals = [r for r in run.pool.submitted if r.rivals]
    assert with_rivals
    for request in with_rivals:
        of = {fitted[rival.device_bytes, rival.tokens_per_second] for rival in request.rivals}
        assert of == {request.config["method"]}


def test_a_trial_is_asked_for_the_speed_that_makes_its_method_practical() -> None:
    practical_speeds = 0
    for seed, share in itertools.product(SEEDS, SHARES):
        run = of_world(seed, share)
        for request in run.pool.submitted:
            following = METHODS[METHODS.index(request.config.text("method")) + 1 :]
            speeds = [
                t.outcome.measurement.tokens_per_second
                for t in run.saved
                if isinstance(t.outcome, Fits) and t.config["method"] in following
            ]
            assert request.least_tokens_per_second in (0.0, *(PRACTICAL * speed for speed in speeds))
            practical_speeds += request.least_tokens_per_second > 0.0
    assert practical_speeds


def test_a_second_search_runs_nothing(truth: Truth) -> None:
    first = searched(truth)
    again = searched(truth, earlier=first.attempts())
    assert (again.opened, again.progress.done) == (0, 0)
    assert again.progress.from_store == explored(first)
    assert again.search.winner() == first.search.winner()
    assert set(again.search.state.ruled_out) == set(first.search.state.ruled_out)
    check_counts_of_memory(again)


def check_counts_of_memory(run: Run) -> None:
    """`check_counts` for a search that the store answered."""
    assert run.saved == []
    assert run.progress.ruled_out == len(run.search.state.ruled_out)
    assert run.progress.stopped_because


@pytest.mark.parametrize("after", [1, 4, 7])
@pytest.mark.parametrize("size", [1, 3])
def test_an_interrupted_search_goes_on(truth: Truth, after: int, size: int) -> None:
    run = prepare(truth, limit_for(truth, 0.5), size=size)

    def interrupt() -> None:
        if len(run.saved) == after:
            raise KeyboardInterrupt

    run.pool.on_wait = interrupt
    with pytest.raises(KeyboardInterrupt):
        run.search.run()
    assert run.pool.closed == 1
    assert len(run.saved) == after == run.progress.done
    rest = searched(truth, earlier=run.attempts(), size=size)
    assert rest.progress.from_store == after
    assert rest.regret < WITHIN_TIES


MACHINERY = Crashed(reason="no space left on /tmp", transient=True)


def test_a_failure_of_the_machinery_costs_its_config_nothing(truth: Truth) -> None:
    undisturbed = searched(truth)
    run = prepare(truth, limit_for(truth, 0.5))
    run.pool.checks.clear()  # which hold it to run nothing twice

    def fails_once(request: TrialRequest) -> Outcome | None:
        times = sum(r.config == request.config for r in run.pool.submitted)
        return MACHINERY if times == 1 and len(run.pool.submitted) % 3 == 0 else None

    run.pool.special = fails_once
    run.search.run()
    failed = [t.config for t in run.saved if t.outcome == MACHINERY]
    assert failed
    assert all(not isinstance(run.search.state.trials[c].outcome, Crashed) for c in failed)
    assert run.progress.failed == len(failed)
    assert run.regret <= undisturbed.regret + 0.02


def test_a_config_that_the_machinery_fails_twice_is_left_to_the_next_search(truth: Truth) -> None:
    victim = searched(truth).pool.submitted[0].config
    run = prepare(truth, limit_for(truth, 0.5))
    run.pool.checks.clear()
    run.pool.special = lambda request: MACHINERY if request.config == victim else None
    run.search.run()
    assert [r.config for r in run.pool.submitted].count(victim) == 2
    rest = searched(truth, earlier=run.attempts())
    assert victim in {r.config for r in rest.pool.submitted}
    assert rest.progress.done <= 3


@pytest.mark.parametrize("good", [0, 5])
def test_machinery_that_fails_again_and_again_ends_the_search_with_its_reason(truth: Truth, good: int) -> None:
    run = prepare(truth, limit_for(truth, 0.5))
    run.pool.checks.clear()
    run.pool.special = lambda request: MACHINERY if len(run.pool.submitted) > good else None
    with pytest.raises(EnvironmentLacks, match="no space left on /tmp"):
        run.search.run()
    assert len(run.saved) == good + MACHINERY_FAILURES
    assert run.pool.closed == 1


@pytest.mark.parametrize("least", [None, 590.0], ids=["before any step", "within a micro-step"])
def test_time_outs_that_nothing_survives_end_the_search_soon(truth: Truth, least: float | None) -> None:
    run = prepare(truth, limit_for(truth, 0.5))
    run.pool.seconds = 600.0
    run.pool.special = lambda request: TimedOut(
        reason="no end within 600 s", deadline_seconds=600.0, least_step_seconds=least
    )
    run.search.run()
    assert run.progress.done == 3
    assert "none fitted" in run.progress.stopped_because


@pytest.mark.parametrize("waited", [0.0, 1e-6, 100.0])
def test_a_trial_that_the_search_s_end_cut_off_says_nothing_of_its_config(truth: Truth, waited: float) -> None:
    """However long it waited for its device, which shortens what it may take."""
    limits = Limits(memory_bytes=32 * GIB, seconds=200.0)
    pool = WaitingPool(truth)
    pool.waited = waited
    made = budget.Budget(limits=limits, clock=lambda: 0.0)
    runs = Scheduler(budget=made, open_pool=lambda: pool, sink=KeptTrials())
    config = truth.lattice.configs[0]
    for patience, cut in ((600.0, True), (50.0, False)):
        request = TrialRequest(job=truth.job, config=config, memory_limit_bytes=32 * GIB, deadline_seconds=patience)
        runs.begin(request)
        trials, cut_off = runs.collect()
        assert (cut_off, [trial.config for trial in trials]) == (([config], []) if cut else ([], [config]))


def test_a_trial_that_waited_in_vain_is_no_failure(truth: Truth) -> None:
    waited = Crashed(reason=f"{NOT_BEGUN}: another autofit process used the device for all of 60 s", transient=True)
    run = prepare(truth, limit_for(truth, 0.5), seconds=600.0, special=lambda request: waited)
    clock = [0.0]
    run.search.clock = lambda: clock[0]
    run.pool.checks.clear()
    run.pool.on_wait = lambda: clock.__setitem__(0, clock[0] + 250.0)
    run.search.run()
    assert (run.progress.done, run.progress.failed, run.saved) == (0, 0, [])
    assert run.progress.stopped_because.startswith("the time budget is spent")
    assert run.search.kept_waiting == waited.reason


@pytest.mark.parametrize("is_proven", [False, True])
def test_a_config_whose_trials_end_early_is_not_begun_for_ever(truth: Truth, is_proven: bool) -> None:
    """Its bound leaves open whether it is the fastest. Once a second trial has ended in the same way, that is for the
    regret bound to count."""
    limit = limit_for(truth, 0.5)
    best = truth.best(limit)
    assert best is not None
    fastest = truth.seconds(best)

    def cut(request: TrialRequest) -> Outcome | None:
        if request.config != best or not request.rivals:
            return None
        return TimedOut(reason="cut", deadline_seconds=60.0, least_step_seconds=0.5 * fastest, is_proven=is_proven)

    run = prepare(truth, limit, special=cut)
    run.pool.checks.clear()  # which let no config run twice
    run.search.run()
    assert [request.config for request in run.pool.submitted].count(best) == 2
    assert run.winner.config != best
    others = prepare(truth, limit, lattice=replace(truth.lattice, configs=tuple(set(truth.lattice.configs) - {best})))
    others.search.run()
    assert run.progress.regret_bound is not None and others.progress.regret_bound is not None
    assert run.progress.regret_bound > others.progress.regret_bound


@pytest.mark.parametrize("differs", ["hardware", "stack"])
def test_workers_of_another_kind_are_refused_before_a_trial(truth: Truth, differs: str) -> None:
    run = prepare(truth, limit_for(truth, 0.5))
    hardware, stack = truth.job.hardware, truth.job.stack
    other = replace(hardware, name="rtx-3090") if differs == "hardware" else hardware
    site = (other, replace(stack, torch="2.11.0") if differs == "stack" else stack)
    run.pool.other_site = site
    with pytest.raises(EnvironmentLacks, match=r"rtx-3090|2\.11\.0"):
        run.search.run()
    assert (run.pool.submitted, run.pool.closed) == ([], 1)


def test_trials_under_a_higher_limit_answer_under_a_lower_one(truth: Truth) -> None:
    wide = searched(truth, 0.9)
    narrow = searched(truth, 0.5, earlier=wide.attempts())
    assert narrow.progress.from_store > 0
    assert narrow.regret < WITHIN_TIES


def test_trials_under_a_lower_limit_answer_under_a_higher_one_where_they_fitted(truth: Truth) -> None:
    narrow = searched(truth, 0.5)
    wide = searched(truth, 0.9, earlier=narrow.attempts())
    assert wide.progress.from_store == len({t.config for t in narrow.saved if isinstance(t.outcome, Fits)})
    assert wide.regret < WITHIN_TIES


def test_a_crash_is_not_repeated_under_the_same_limit(truth: Truth) -> None:
    best = truth.best(limit_for(truth, 0.5))
    assert best is not None
    earlier = {best: [make_trial(best, crashed(), job=truth.job, limit=limit_for(truth, 0.5))]}
    run = searched(truth, earlier=earlier)
    assert best not in {r.config for r in run.pool.submitted}


def test_what_was_measured_to_fit_is_not_forgotten(truth: Truth) -> None:
    """A lighter config ran out of memory, once, for whatever reason: what fitted above it has still been seen."""
    limit = limit_for(truth, 0.9)
    heavy = truth.best(limit)
    assert heavy is not None
    light = next(c for c in truth.lattice.configs if c != heavy and heavy in truth.lattice.above(c))
    earlier = {
        light: [make_trial(light, out_of_memory(), job=truth.job, limit=limit)],
        heavy: [truth.trial(heavy, limit), truth.trial(heavy, limit, 1)],
    }
    run = searched(truth, 0.9, earlier=earlier)
    assert heavy in run.search.state.trials
    assert run.winner.config == heavy


def test_the_methods_of_the_goal_are_ranked(truth: Truth) -> None:
    lora = [c for c in truth.lattice.configs if c["method"] == "lora"]
    only = Lattice(axes=truth.lattice.axes, configs=tuple(lora))
    run = searched(truth, 0.5, lattice=only, methods=("lora",))
    fitting = [c for c in lora if truth.memory(c) <= run.limit]
    assert truth.seconds(run.winner.config) / min(map(truth.seconds, fitting)) < 1.03


def test_every_trial_says_how_it_was_run(truth: Truth) -> None:
    run = searched(truth)
    for trial, number in zip(run.saved, range(1, 1000), strict=False):
        assert trial.trial_id == number
        assert trial.memory_limit_bytes == run.limit
        assert (trial.workload, trial.hardware, trial.stack) == (
            truth.job.workload,
            truth.job.hardware,
            truth.job.stack,
        )
        assert trial.seconds == 5.0
        assert trial.recorded_at.endswith("+00:00")


def test_a_config_whose_loss_is_its_own_has_diverged(truth: Truth) -> None:
    """An exact technique gives its family's loss; one that does not is no candidate, however fast."""
    wrong = truth.best(limit_for(truth, 0.5))
    assert wrong is not None

    def special(request: TrialRequest) -> Outcome | None:
        if request.config != wrong or not run.saved:
            return None
        m = truth.measured(request.config, 1).measurement
        return Fits(measurement=replace(m, losses=(10.8, 9.0, 7.0)))

    run = prepare(truth, limit_for(truth, 0.5), special=special)
    run.search.run()
    outcome = next(t.outcome for t in run.saved if t.config == wrong)
    assert isinstance(outcome, Diverged)
    assert "10.5" in outcome.reason and "9.0" in outcome.reason
    assert run.winner.config != wrong


def test_with_dropout_every_config_has_a_loss_of_its_own(truth: Truth) -> None:
    gpt2 = Model(
        name="tiny-gpt2",
        config={"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 512},
        source="tests",
        parameters=None,
    )
    wild = replace(truth, job=replace(truth.job, model=gpt2))

    def special(request: TrialRequest) -> Outcome:
        m = truth.measured(request.config, 1).measurement
        losses = tuple(x + 0.5 * len(run.pool.submitted) for x in m.losses)
        return Fits(measurement=replace(m, losses=losses))

    run = prepare(wild, 2**40, special=special, max_trials=12)
    run.search.run()
    assert all(isinstance(t.outcome, Fits) for t in run.saved)


@pytest.mark.parametrize(("spread", "runs"), [(0.6, 1), (0.02, 0)])
def test_a_rival_whose_only_trial_was_noisy_runs_again(truth: Truth, spread: float, runs: int) -> None:
    """The best config has a trial that was slowed by a tenth; whether that may have been noise, its spread says."""
    limit = limit_for(truth, 0.5)
    best = truth.best(limit)
    assert best is not None
    seen = truth.measured(best, 0).measurement
    steps = replace(seen.step_seconds, median=1.1 * seen.step_seconds.median, relative_spread=spread)
    slowed = Fits(measurement=replace(seen, step_seconds=steps, tokens_per_second=seen.tokens_per_second / 1.1))
    run = searched(truth, 0.5, earlier={best: [make_trial(best, slowed, job=truth.job, limit=limit)]})
    assert [r.config for r in run.pool.submitted].count(best) == runs
    if runs:
        assert run.regret < WITHIN_TIES
