"""The frontier that SQL finds is the one that `Frontier.of` finds, and it is found fast."""

from __future__ import annotations

import itertools
import json
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit.frontier import Frontier, Point
from autofit.lattice import Config
from autofit.outcome import Fits, Outcome, OutOfMemory, TimedOut, Trial, outcome_to_json
from autofit.store import Store
from autofit.techniques import family
from autofit.workload import METHODS

MakeTrial = Callable[..., Trial]
MakeFits = Callable[..., Fits]

WORKLOADS = itertools.count()


def frontier_of(trials: list[Trial]) -> Frontier | None:
    """The frontier of the latest fitting attempt of each config, without SQL."""
    if not trials:
        return None
    latest = {trial.config: trial for trial in trials if isinstance(trial.outcome, Fits)}
    return Frontier.of(
        (
            Point(config=trial.config, measurement=trial.outcome.measurement, trial_id=trial.trial_id)
            for trial in sorted(latest.values(), key=lambda trial: trial.trial_id or 0)
            if isinstance(trial.outcome, Fits)
        ),
        hardware=trials[-1].hardware,
        workload=trials[-1].workload,
        stack=trials[-1].stack,
        trials=len(trials),
        out_of_memory=sum(isinstance(trial.outcome, OutOfMemory) for trial in trials),
    )


def found(store: Store, trial: Trial) -> Frontier | None:
    """The store's frontier of a trial's hardware, stack and workload."""
    return store.frontier(hardware_key=trial.hardware.key, stack_key=trial.stack.key, workload_key=trial.workload.key)


def test_is_that_of_the_latest_attempts(store: Store, make_trial: MakeTrial, fits: MakeFits) -> None:
    base = make_trial()

    def add(rank: int, outcome: Outcome, method: str = "lora", **changes: object) -> Trial:
        config = base.config.replace(method=method, rank=rank)
        return store.add(make_trial(config=config, outcome=outcome, **changes))

    tried = [
        add(8, fits(100.0, 10)),
        add(16, fits(300.0, 30)),
        add(16, fits(200.0, 20)),
        add(32, fits(150.0, 20)),
        add(64, fits(200.0, 20)),
        add(128, OutOfMemory(reason="")),
        add(8, OutOfMemory(reason=""), memory_limit_bytes=5),
        add(8, fits(50.0, 20), method="qlora"),
    ]
    elsewhere = replace(base, stack=replace(base.stack, torch="2.14.0"), outcome=fits(1e9, 1))
    store.add(elsewhere)
    frontier = found(store, base)
    assert frontier is not None
    assert frontier == frontier_of(tried)
    assert [point.trial_id for point in frontier.points] == [tried[i].trial_id for i in (0, 2, 7)]
    assert (frontier.trials, frontier.out_of_memory) == (8, 2)


def test_has_no_points_where_nothing_fits(store: Store, make_trial: MakeTrial) -> None:
    trial = store.add(make_trial(outcome=OutOfMemory(reason="")))
    frontier = found(store, trial)
    assert frontier is not None
    assert (frontier.points, frontier.trials, frontier.out_of_memory) == ((), 1, 1)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """One store for all examples, each with a workload of its own."""
    with Store.open(str(tmp_path_factory.mktemp("frontier") / "store.db")) as store:
        yield store


SMALL = st.integers(min_value=1, max_value=4)
TRIED = st.tuples(st.sampled_from(METHODS), SMALL, st.sampled_from([None, "oom", "late"]), SMALL, SMALL, st.booleans())


def drawn_trial(make_trial: MakeTrial, fits: MakeFits, drawn: tuple[str, int, str | None, int, int, bool]) -> Trial:
    """The trial of what hypothesis draws."""
    method, batch, failure, speed, memory, tight = drawn
    outcomes: dict[str | None, Outcome] = {
        None: fits(speed / 3, memory),
        "oom": OutOfMemory(reason=""),
        "late": TimedOut(reason="", deadline_seconds=1.0),
    }
    return make_trial(
        config=Config.of({"method": method, "micro_batch": batch}),
        outcome=outcomes[failure],
        memory_limit_bytes=2**30 if tight else 2**31,
    )


def test_equals_the_frontier_without_sql(shared: Store, make_trial: MakeTrial, fits: MakeFits) -> None:
    @settings(max_examples=150, deadline=None, database=None)
    @given(st.lists(TRIED, min_size=1, max_size=14))
    def holds(drawn: list[tuple[str, int, str | None, int, int, bool]]) -> None:
        seed = next(WORKLOADS)
        tried = []
        for one in drawn:
            trial = drawn_trial(make_trial, fits, one)
            tried.append(shared.add(replace(trial, workload=replace(trial.workload, seed=seed))))
        frontier, expected = found(shared, tried[-1]), frontier_of(tried)
        assert frontier is not None
        assert expected is not None
        assert frontier == expected
        assert [point.trial_id for point in frontier.points] == [point.trial_id for point in expected.points]

    holds()


COPY = """
    INSERT INTO trials (hardware_digest, hardware_key, stack_key, workload_key, memory_limit_bytes, attempt,
        seconds, recorded_at, config_key, method, family, outcome, device_bytes, tokens_per_second, config, evidence)
    SELECT hardware_digest, hardware_key, stack_key, workload_key, memory_limit_bytes, 1,
        seconds, recorded_at, ?, ?, ?, ?, ?, ?, ?, ?
    FROM trials WHERE id = 1
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a file for 100,000 trials may be."""
    return tmp_path_factory.mktemp("large") / "store.db"


def fill(path: Path, count: int, fitting: Fits) -> dict[int, tuple[str, int, float]]:
    """Copies the first trial `count` times with other configs and results.

    Returns method, bytes and tokens per second of each that fits, by id.
    """
    chance = random.Random(0)
    failed = json.dumps(outcome_to_json(OutOfMemory(reason="")))
    evidence = outcome_to_json(fitting)
    rows, results = [], {}
    for number in range(2, count + 2):
        method, memory = chance.choice(METHODS), chance.randrange(2**30, 80 * 2**30)
        # Faster with more memory up to a point, as techniques trade one for the other.
        speed = 1e4 * min(1.0, memory / 2**35) * chance.betavariate(2, 2)
        fit = chance.random() < 0.8
        config = Config.of({"method": method, "precision": chance.choice(("bf16", "fp32")), "micro_batch": number})
        evidence["measurement"] |= {"device_bytes": memory, "tokens_per_second": speed}
        rows.append(
            (
                config.key,
                method,
                family(config),
                "fits" if fit else "out_of_memory",
                memory if fit else None,
                speed if fit else None,
                json.dumps(config.to_json()),
                json.dumps(evidence) if fit else failed,
            )
        )
        if fit:
            results[number] = (method, memory, speed)
    connection = sqlite3.connect(path)
    with connection:
        connection.executemany(COPY, rows)
    connection.close()
    return results


def undominated(results: dict[int, tuple[str, int, float]]) -> set[int]:
    """Ids of the results that none of their method beats."""
    kept: set[int] = set()
    for method in METHODS:
        fastest = 0.0
        for number, (_, _, speed) in sorted(
            ((number, result) for number, result in results.items() if result[0] == method),
            key=lambda item: (item[1][1], -item[1][2]),
        ):
            if speed > fastest:
                fastest = speed
                kept.add(number)
    return kept


def test_answers_within_a_second_from_100_000_trials(large: Path, make_trial: MakeTrial, fits: MakeFits) -> None:
    with Store.open(str(large)) as store:
        first = store.add(make_trial(outcome=OutOfMemory(reason="")))
    results = fill(large, 100_000, fits())
    seconds = []
    for _ in range(3):
        # Opened anew each time, as every command does.
        begun = time.perf_counter()
        with Store.open(str(large), create=False) as store:
            frontier = found(store, first)
            store.hardware(), store.workloads(model=first.workload.model)
            store.stacks(first.hardware.key, first.workload.key)
        seconds.append(time.perf_counter() - begun)
    assert frontier is not None
    assert {point.trial_id for point in frontier.points} == undominated(results)
    assert frontier.trials == 100_001
    assert min(seconds) < 1.0, seconds
    with Store.open(str(large), create=False) as store:
        begun = time.perf_counter()
        assert len(store.trials(workload_key=first.workload.key, newest_first=True, limit=50)) == 50
        assert store.count(model=first.workload.model, outcome="fits") == len(results)
        assert time.perf_counter() - begun < 1.0


def test_what_the_user_does_not_allow_hides_nothing(store: Store, make_trial: MakeTrial, fits: MakeFits) -> None:
    """A config of another family that beats all others must not keep them off the frontier of who cannot use it."""
    base = make_trial()
    plain = base.config.replace(method="full", precision="bf16-mixed", optimizer="adamw")
    other = plain.replace(optimizer="sgd")
    for config, speed, memory in ((plain, 50.0, 20), (other, 100.0, 10)):
        store.add(replace(base, config=config, outcome=fits(speed, memory)))
    where = {"hardware_key": base.hardware.key, "stack_key": base.stack.key, "workload_key": base.workload.key}
    every = store.frontier(**where)
    allowed = store.frontier(**where, allowed=lambda config: config["optimizer"] == "adamw")
    assert every is not None and [p.config for p in every.points] == [other]
    assert allowed is not None and [p.config for p in allowed.points] == [plain]
