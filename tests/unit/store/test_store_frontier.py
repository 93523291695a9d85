"""The frontier from the trials that the database selects is that of all of them, and no table is walked for it."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, event, update
from unit.store.conftest import a_trial, context, measured

from autofit.core.device.state import CardState, DeviceState
from autofit.core.frontier import Frontier, choose, point
from autofit.core.lattice import Config
from autofit.core.outcome import DEADLINE_SECONDS, Crashed, Fits, Outcome, OutOfMemory, TimedOut, Trial
from autofit.core.repeatability import between_executions
from autofit.core.verdict import verdict
from autofit.core.workload import METHODS
from autofit.store import Store, attempts
from autofit.store.tables import TrialRow

CARDS = itertools.count()


def executions_differ_by(attempts: dict[Config, list[Trial]]) -> float:
    """What all that was timed in full and undisturbed more than once shows of it."""
    full = ([p for t in every if t.timed_in_full and not t.doubts and (p := point(t))] for every in attempts.values())
    return between_executions(
        [(p.measurement.tokens_per_second, p.measurement.step_seconds.relative_spread or 0.0) for p in every]
        for every in full
    )


def frontier_of(trials: list[Trial], limit: int | None = None) -> Frontier:
    """The frontier of what each config is known by, judged one after another."""
    attempts: dict[Config, list[Trial]] = {}
    for trial in trials:
        attempts.setdefault(trial.config, []).append(trial)
    return Frontier.judged(
        attempts.values(),
        limit or 0,
        executions_differ_by(attempts),
        hardware=trials[-1].hardware,
        workload=trials[-1].workload,
        stack=trials[-1].stack,
        trials=len(trials),
        out_of_memory=sum(isinstance(trial.outcome, OutOfMemory) for trial in trials),
    )


def early(speed: float, memory: int) -> Fits:
    """The outcome of a trial that was stopped early."""
    return Fits(measurement=replace(measured(speed, memory).measurement, stopped_early=True))


def stored_frontier(store: Store, trial: Trial, limit: int | None = None) -> Frontier:
    """The store's frontier of a trial's hardware, stack and workload."""
    frontier = store.frontier(**context(trial), memory_limit_bytes=limit)
    assert frontier is not None
    return frontier


def test_is_that_of_the_latest_attempts(store: Store) -> None:
    base = a_trial()

    def add(rank: int, outcome: Outcome, method: str = "lora", **changes: object) -> Trial:
        config = base.config.replace(method=method, rank=rank)
        return store.add(a_trial(config=config, outcome=outcome, **changes))

    tried = [
        add(8, measured(100.0, 10)),
        add(16, measured(300.0, 30)),
        add(16, measured(200.0, 20)),
        add(32, measured(150.0, 20)),
        add(64, measured(200.0, 20)),
        add(128, OutOfMemory(reason="")),
        add(8, OutOfMemory(reason=""), memory_limit_bytes=5),
        add(8, measured(50.0, 20), method="qlora"),
    ]
    elsewhere = replace(base, stack=replace(base.stack, torch="2.14.0"), outcome=measured(1e9, 1))
    store.add(elsewhere)
    frontier = stored_frontier(store, base)
    expected = frontier_of(tried)
    assert replace(frontier, considered=()) == replace(expected, considered=())
    assert [point.trial_id for point in frontier.points] == [tried[i].trial_id for i in (0, 2, 7)]
    assert (frontier.trials, frontier.out_of_memory) == (8, 2)


def test_has_no_points_where_nothing_fits(store: Store) -> None:
    trial = store.add(a_trial(outcome=OutOfMemory(reason="")))
    frontier = stored_frontier(store, trial)
    assert (frontier.points, frontier.trials, frontier.out_of_memory) == ((), 1, 1)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """One store for all examples, each with hardware of its own."""
    with Store.open(str(tmp_path_factory.mktemp("frontier") / "store.db")) as store:
        yield store


@pytest.mark.parametrize(
    "failure", [OutOfMemory(reason=""), Crashed(reason=""), TimedOut(reason="", deadline_seconds=600.0)]
)
def test_a_later_failure_hides_what_fitted_before(store: Store, failure: Outcome) -> None:
    """As after a winner's second run: what a search has just rejected is not recommended."""
    winner = a_trial(outcome=measured(300.0, 30), memory_limit_bytes=100)
    other = a_trial(config=winner.config.replace(rank=64), outcome=measured(200.0, 20), memory_limit_bytes=100)
    for trial in (winner, other, replace(winner, outcome=failure)):
        store.add(trial)
    for limit in (None, 100):
        frontier = stored_frontier(store, winner, limit)
        assert [p.config for p in frontier.points] == [other.config]
    for _ in range(2 if isinstance(failure, OutOfMemory) else 1):
        frontier = stored_frontier(store, winner, 100)
        assert frontier.points[-1].config == other.config
        assert frontier.contradictory == isinstance(failure, OutOfMemory)
        store.add(winner)
    frontier = stored_frontier(store, winner, 100)
    assert frontier.points[-1].config == winner.config, "it fits again"
    assert frontier.contradictory == 0


def test_what_ran_out_of_memory_before_is_believed_once_it_has_fitted_twice(store: Store) -> None:
    failed = a_trial(outcome=OutOfMemory(reason=""), memory_limit_bytes=50)
    tried = (failed, replace(failed, outcome=measured(300.0, 30)), replace(failed, outcome=early(300.0, 30)))
    for trial in tried:
        store.add(trial)
    for limit, contradictory in ((None, 1), (50, 1), (40, 1), (60, 0), (20, 0)):
        frontier = stored_frontier(store, failed, limit)
        # Of a limit above that which did not do nothing is known but that it fitted; below what it took no more.
        assert (frontier.contradictory, len(frontier.points)) == (contradictory, limit == 60), limit
    store.add(tried[1])
    for limit in (None, 50, 40, 60):
        frontier = stored_frontier(store, failed, limit)
        assert (frontier.contradictory, len(frontier.points)) == (0, 1)


def test_host_memory_contradicts_nothing(store: Store) -> None:
    failed = store.add(a_trial(outcome=OutOfMemory(reason="", host=True)))
    store.add(a_trial())
    for limit in (None, failed.memory_limit_bytes):
        frontier = stored_frontier(store, failed, limit)
        assert (frontier.contradictory, len(frontier.points)) == (0, 1)


def test_a_failure_of_the_machinery_hides_nothing(store: Store) -> None:
    trial = store.add(a_trial())
    store.add(a_trial(outcome=Crashed(reason="the worker was lost", transient=True)))
    frontier = stored_frontier(store, trial)
    assert [p.trial_id for p in frontier.points] == [trial.trial_id]


def test_a_trial_beside_others_counts_only_where_there_is_no_clean_one(store: Store) -> None:
    shared = DeviceState(seconds=3.0, cards=(CardState(uuid="GPU-a", others_share=0.5),))
    clean = a_trial(outcome=measured(100.0, 20))
    beside = replace(clean, device_state=shared, outcome=measured(50.0, 20))
    hurried = TimedOut(reason="no end within 600 s", deadline_seconds=DEADLINE_SECONDS)
    alone = replace(beside, config=clean.config.replace(rank=64), outcome=measured(70.0, 30))
    again = replace(alone, outcome=measured(80.0, 30))
    tried = [clean, beside, replace(beside, outcome=hurried), alone, again]
    stored = [store.add(trial) for trial in tried]
    assert stored == tried == store.trials() and stored[1].doubts and not stored[0].doubts
    for limit in (None, clean.memory_limit_bytes):
        frontier = stored_frontier(store, clean, limit)
        assert {p.measurement.tokens_per_second for p in frontier.considered} == {100.0, 80.0}
    settled = [verdict(attempts, clean.memory_limit_bytes) for attempts in store.attempts(**context(clean)).values()]
    assert settled == [clean, again]
    assert store.between_executions(clean.hardware.key) == 0.0


def test_what_was_stopped_early_counts_only_where_there_is_nothing_else(store: Store) -> None:
    both = a_trial(outcome=measured(100.0, 10))
    alone = a_trial(config=both.config.replace(method="qlora"), outcome=early(300.0, 30))
    tried = [store.add(both), store.add(replace(both, outcome=early(150.0, 10))), store.add(alone)]
    frontier = stored_frontier(store, both)
    assert [p.trial_id for p in frontier.points] == [tried[0].trial_id, tried[2].trial_id]


SMALL = st.integers(min_value=1, max_value=4)
LIMITS = (2, 3, 4)
Drawn = tuple[tuple[str, int, str], str | None, int, int, int]
CONFIGS = [("full", 1, "bf16"), ("full", 2, "bf16"), ("full", 1, "fp32"), ("lora", 1, "bf16")]
APART = 1e-9
"""tokens/s by which two configs differ at least: of two with the very same figures a frontier keeps either one."""
HISTORY = st.tuples(
    st.sampled_from(CONFIGS),
    st.sampled_from([None, None, "early", "oom", "host", "late", "hurried", "machinery", "aside", "beside", "before"]),
    SMALL,
    SMALL,
    st.sampled_from(LIMITS),
)


OVER_THEN_EARLY: list[Drawn] = [(("lora", 1, "bf16"), None, 1, 3, 2), (("lora", 1, "bf16"), "early", 1, 1, 2)]
"""Timed in full it went over the limit of 2, and when it was stopped early it did not."""


def in_fp32(config: Config) -> int:
    """What stands in for how much a config changes: the same within a family."""
    return int(config["precision"] == "fp32")


def drawn_trial(drawn: Drawn) -> Trial:
    """The trial of what hypothesis draws."""
    (method, batch, precision), how, speed, memory, limit = drawn
    full = measured(speed / 3 + CONFIGS.index(drawn[0]) * APART, memory)
    outcomes: dict[str | None, Outcome] = {
        None: full,
        "early": Fits(measurement=replace(full.measurement, stopped_early=True)),
        "oom": OutOfMemory(reason=""),
        "host": OutOfMemory(reason="", host=True),
        "late": TimedOut(reason="", deadline_seconds=600.0),
        "hurried": TimedOut(reason="", deadline_seconds=9.0),
        "machinery": Crashed(reason="", transient=True),
    }
    states = {
        "aside": DeviceState(seconds=1.0, set_aside="slower than others of its type"),
        "beside": DeviceState(seconds=3.0, cards=(CardState(uuid="GPU-a", others_share=0.5),)),
    }
    return a_trial(
        config=Config.of({"method": method, "micro_batch": batch, "precision": precision}),
        outcome=outcomes.get(how, full),
        memory_limit_bytes=limit,
        device_state=states.get(how or ""),
    )


@settings(max_examples=120, deadline=None, database=None)
@given(st.lists(HISTORY, min_size=1, max_size=10))
@example(drawn=OVER_THEN_EARLY)
def test_equals_the_frontier_of_all_configs_judged_one_by_one(shared: Store, drawn: list[Drawn]) -> None:
    number = next(CARDS)
    tried: list[Trial] = []
    for one in drawn:
        trial = drawn_trial(one)
        card = replace(trial.hardware, device_name=f"card {number}")
        if one[1] == "before" and tried:  # one that has been judged is set aside
            shared.set_aside(tried[-1], "slower than others of its type")
        writer = shared if one[1] is None else Store(shared._database)  # another process
        writer.add(replace(trial, hardware=card))
        tried = shared.trials(hardware_key=card.key)
        frontier, expected = stored_frontier(shared, tried[-1], one[4]), frontier_of(tried, one[4])
        assert replace(frontier, considered=()) == replace(expected, considered=()), "read on from the one before"
        assert shared.count(hardware_key=card.key) == len(tried)
    for limit in (None, 1, *LIMITS):
        frontier, expected = stored_frontier(shared, tried[-1], limit), frontier_of(tried, limit)
        # Which points are considered is the store's affair, as long as none is missing that may be chosen.
        assert replace(frontier, considered=()) == replace(expected, considered=())
        chosen = [
            choose(f.considered, memory_limit_bytes=limit or 4, methods=METHODS, changes=in_fp32)
            for f in (frontier, expected)
        ]
        assert len({p and (p.config, p.measurement.tokens_per_second) for p in chosen}) == 1
        assert [point.trial_id for point in frontier.points] == [point.trial_id for point in expected.points]


def test_points_know_what_executions_of_one_config_differ_by(store: Store) -> None:
    """On their hardware, whatever was trained; another stack, what was stopped early and one step alone say nothing."""

    def steps(fit: Fits, spread: float | None) -> Fits:
        m = fit.measurement
        return Fits(measurement=replace(m, step_seconds=replace(m.step_seconds, relative_spread=spread)))

    base = a_trial(outcome=steps(measured(100.0, 10), 0.01))
    for trial in (
        base,
        replace(base, outcome=early(1.0, 10)),
        replace(base, outcome=steps(measured(7.0, 10), None)),
        replace(base, outcome=OutOfMemory(reason=""), memory_limit_bytes=5),
        replace(base, stack=replace(base.stack, torch="2.14.0"), outcome=measured(9.0, 10)),
        replace(base, hardware=replace(base.hardware, device_name="another card"), outcome=measured(9.0, 10)),
    ):
        store.add(trial)
    assert store.between_executions(base.hardware.key) == 0.0
    longer = replace(base, workload=replace(base.workload, seq_len=2 * base.workload.seq_len))
    runs = [steps(measured(speed, 10), spread) for speed, spread in ((300.0, 0.02), (330.0, 0.01), (310.0, 0.03))]
    for outcome in runs:
        store.add(replace(longer, outcome=outcome))
    executions = [(o.measurement.tokens_per_second, o.measurement.step_seconds.relative_spread or 0.0) for o in runs]
    between = store.between_executions(base.hardware.key)
    assert between == pytest.approx(between_executions([executions])) and between > 0.01
    frontier = stored_frontier(store, longer)
    assert {p.between for p in frontier.points} == {between}
    assert store.between_executions("no such hardware") == 0.0


def test_what_other_hardware_ran_since_hides_no_repeats(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autofit.store.ranking.LATEST", 3)
    runs = [store.add(a_trial(outcome=measured(speed, 10))) for speed in (300.0, 390.0, 310.0)]
    hardware = runs[0].hardware
    between = store.between_executions(hardware.key)
    for _ in range(5):
        store.add(a_trial(hardware=replace(hardware, device_name="another card")))
    assert store.between_executions(hardware.key) == between > 0.05


@pytest.mark.parametrize("limit", [None, 30 * 2**30])
def test_no_table_is_walked_and_a_configs_trials_are_found_by_its_key(tmp_path: Path, limit: int | None) -> None:
    path = tmp_path / "store.db"
    statements: list[tuple[str, tuple[object, ...]]] = []
    with Store.open(str(path)) as store:
        trial = store.add(a_trial())
        store.add(replace(trial, outcome=measured(), trial_id=None))
        engine = store._database.engine
        event.listen(engine, "before_cursor_execute", lambda *given: statements.append((given[2], given[3])))
        stored_frontier(store, trial, limit)
        store.add(replace(trial, config=trial.config.replace(rank=64), outcome=measured(), trial_id=None))
        stored_frontier(store, trial, limit)
        store.attempts(**context(trial))
        store.trials(**context(trial), newest_first=True, limit=1)
        store.hardware()
    with closing(sqlite3.connect(path)) as connection:
        plans = [
            (row[3], statement)
            for statement, values in statements
            if statement.startswith(("SELECT", "WITH"))
            for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", values)
        ]
    walked = [statement for plan, statement in plans if plan.startswith("SCAN trials")]
    assert all("ORDER BY trials.id DESC" in w and "LIMIT" in w for w in walked), "but for the latest rows"
    of_config = [plan for plan, _ in plans if plan.startswith("SEARCH run ")]
    of_config += [plan for plan, statement in plans if " AS one" in statement and plan.startswith("SEARCH trials ")]
    assert of_config and all("config_key=?" in way for way in of_config), of_config
    of_context = [(plan, statement) for plan, statement in plans if "trials.workload_key = " in statement]
    ways = [plan for plan, _ in of_context if plan.startswith("SEARCH trials ")]
    assert ways and not any("ix_trials_hardware" in way for way in ways), "past all that ran there since"
    assert sum("COVERING INDEX ix_trials_context" in way for way in ways) >= 6, "without the rows that a frontier hides"
    assert not any("ORDER BY" in plan for plan, _ in of_context), "the index has the order"


def test_a_trial_that_is_committed_after_one_of_a_higher_number_counts(store: Store) -> None:
    first, second = (a_trial(config=a_trial().config.replace(rank=rank), outcome=measured(rank)) for rank in (8, 16))
    store.add(second)
    before = stored_frontier(store, second)

    def commit(connection: Connection) -> None:
        number = attempts.add(connection, first, None, uid="late")
        connection.execute(update(TrialRow).where(TrialRow.id == number).values(id=-1))

    store._database.commit(commit)
    after = stored_frontier(store, second)
    assert (before.trials, after.trials) == (1, 2) and {p.config for p in after.considered} > {second.config}


def test_what_the_user_does_not_allow_hides_nothing(store: Store) -> None:
    """A config of another family that beats all others must not keep them off the frontier of who cannot use it."""
    base = a_trial()
    plain = base.config.replace(method="full", precision="bf16-mixed", optimizer="adamw")
    other = plain.replace(optimizer="sgd")
    for config, speed, memory in ((plain, 50.0, 20), (other, 100.0, 10)):
        store.add(replace(base, config=config, outcome=measured(speed, memory)))
    every = stored_frontier(store, base)
    assert [p.config for p in every.points] == [other]
    allowed = every.only(lambda config: config["optimizer"] == "adamw")
    assert [p.config for p in allowed.points] == [plain]


def test_asked_again_it_is_read_only_after_a_change(store: Store) -> None:
    first = store.add(a_trial())
    asked = context(first)
    before = store.frontier(**asked)
    read: list[str] = []
    event.listen(store._database.engine, "before_cursor_execute", lambda *given: read.append(given[2]))
    assert store.frontier(**asked) == before
    beyond = store.frontier(**asked, memory_limit_bytes=first.memory_limit_bytes)
    assert beyond == before and not any("FROM trials" in statement for statement in read), "whatever the limit"
    store.set_aside(first, "slower than others of its type")
    changed = store.frontier(**asked)
    assert before is not None and before.points and changed is not None and not changed.points
