"""What the oracle answers, counts and ends."""

from __future__ import annotations

import itertools
import random
import statistics
from dataclasses import replace

import pytest
from unit.bench.made_tables import LIMIT, recorded
from unit.operations.made_trials import fits, out_of_memory
from unit.search.made_truth import Truth

from autofit.bench.oracle import HORIZON, MOST_ASKS, Enough, Oracle, drawn_again
from autofit.bench.recorded import Recorded, under
from autofit.core.outcome import Fits, OutOfMemory, StepSeconds
from autofit.core.units import GIB
from autofit.techniques import lightness


@pytest.fixture(scope="session")
def table(truth: Truth) -> Recorded:
    """All full fine-tunings of a world."""
    return recorded(truth)


def speed(outcome: object) -> float:
    assert isinstance(outcome, Fits)
    return outcome.measurement.tokens_per_second


def test_a_table_for_tests_has_both(table: Recorded) -> None:
    assert len(table.problem.configs) >= 2 * HORIZON
    assert 0.15 < table.out_of_memory / len(table.trials) < 0.85


def test_what_runs_is_paid_for_and_a_repeat_is_not(table: Recorded) -> None:
    oracle, config = Oracle(table, 0), table.best.config
    first = oracle.ask(config)
    assert oracle.ask(config) == first
    trace = oracle.trace(stopped=True)
    assert (trace.asks, len(trace.runs)) == (2, 1)
    assert trace.runs[0].seconds == first.seconds == 7.5
    # The trace has the speed as recorded, whatever the method saw.
    assert trace.runs[0].outcome == table.trials[config].outcome != first.outcome


def test_a_second_run_is_paid_for_and_draws_anew(table: Recorded) -> None:
    oracle, config = Oracle(table, 0), table.best.config
    first, second = oracle.ask(config), oracle.ask(config, again=True)
    assert speed(first.outcome) != speed(second.outcome)
    trace = oracle.trace(stopped=True)
    assert (trace.asks, len(trace.runs)) == (2, 2)


def test_all_methods_see_the_same_draw_and_each_seed_another(table: Recorded) -> None:
    a, b = table.best.config, table.points[0].config
    one, other = Oracle(table, 3), Oracle(table, 3)
    one.ask(b)
    assert one.ask(a) == other.ask(a)
    assert len({speed(Oracle(table, seed).ask(a).outcome) for seed in range(20)}) == 20


def test_draws_stay_within_the_recorded_spread() -> None:
    made = fits(1.0, 100)
    steps = StepSeconds(median=5.12, p95=6.0, relative_spread=0.2)
    outcome = replace(made, measurement=replace(made.measurement, step_seconds=steps))
    source = random.Random(0)
    drawn = [drawn_again(outcome, source) for _ in range(2000)]
    factors = [speed(d) / 100 for d in drawn]
    assert 1 / 1.1052 <= min(factors) < 0.92 and 1.08 < max(factors) <= 1.1052  # exp(0.1)
    assert statistics.stdev(factors) == pytest.approx(0.2 / 3.29, rel=0.25)  # less, for the ends are cut off
    for d in drawn[:5]:
        assert isinstance(d, Fits)
        measured = d.measurement
        assert measured.step_seconds.median * measured.tokens_per_second == pytest.approx(512)
        assert measured.device_bytes == made.measurement.device_bytes


@pytest.mark.parametrize("spread", [None, 0.0])
def test_without_a_spread_nothing_is_drawn(spread: float | None) -> None:
    made = fits(1.0, 100)
    steps = replace(made.measurement.step_seconds, relative_spread=spread)
    outcome = replace(made, measurement=replace(made.measurement, step_seconds=steps))
    assert drawn_again(outcome, random.Random(0)) is outcome
    ran_out = out_of_memory()
    assert drawn_again(ran_out, random.Random(0)) is ran_out


def test_outside_of_the_table_the_nearest_answers(truth: Truth) -> None:
    table = recorded(truth, keep=lambda c: c["micro_batch"] != 2 and c["precision"] != "fp32")
    lacking = table.best.config.replace(micro_batch=2, loss="full")
    oracle = Oracle(table, 0)
    answer = oracle.ask(lacking)
    trace = oracle.trace(stopped=True)
    assert trace.asks == 1
    assert trace.runs[0].config == table.problem.nearest(lacking) == lacking.replace(micro_batch=1)
    assert oracle.ask(lacking) == answer and oracle.trace(stopped=True).runs == trace.runs
    # Fewest axes first: one that differs far on one axis is nearer than one that differs little on two.
    assert table.problem.nearest(lacking.replace(micro_batch=3)).number("micro_batch") == 4
    assert table.problem.nearest(table.best.config) == table.best.config
    # Of two that differ on one axis, the one that trains the same: not the first, which has another number format.
    mixed = table.best.config.replace(precision="bf16-mixed", loss="chunked", micro_batch=4, checkpointing="none")
    without = replace(table.problem, configs=tuple(c for c in table.problem.configs if c != mixed))
    assert without.nearest(mixed)["precision"] == "bf16-mixed"


def test_a_search_ends_when_more_would_not_change_its_score(table: Recorded) -> None:
    slowest_first = sorted(table.points, key=lambda p: p.measurement.tokens_per_second)
    speeds, rest = [p.measurement.tokens_per_second for p in slowest_first], [p.config for p in slowest_first]
    near = 1 + next(i for i, speed in enumerate(speeds) if speed >= 0.99 * speeds[-1])
    assert near > HORIZON
    for order, expected in (([rest[-1], *rest], HORIZON), (rest, near)):
        oracle = Oracle(table, 0)
        with pytest.raises(Enough):
            for config in order:
                oracle.ask(config)
            oracle.ask(rest[0])
        assert len(oracle.trace(stopped=False).runs) == expected


def test_a_search_that_asks_for_ever_is_ended(table: Recorded) -> None:
    oracle = Oracle(table, 0)
    with pytest.raises(Enough):
        for _ in itertools.count():
            oracle.ask(table.problem.configs[0])
    assert oracle.trace(stopped=False).asks == MOST_ASKS
    with pytest.raises(Enough):
        oracle.ask(table.problem.configs[0], again=True)


def test_a_search_that_knows_everything_is_ended(truth: Truth) -> None:
    table = recorded(truth, keep=lambda c: c["precision"] == "bf16" and c["micro_batch"] == 1)
    oracle = Oracle(table, 0)
    for config in table.problem.configs:
        oracle.ask(config)
    with pytest.raises(Enough):
        oracle.ask(table.problem.configs[0])


def test_a_lower_limit_makes_what_it_does_not_hold_run_out() -> None:
    outcome = fits(1.5, 100)
    assert under(2 * GIB, outcome) is outcome
    lowered = under(GIB, outcome)
    assert isinstance(lowered, OutOfMemory) and "1.50 GiB" in lowered.reason and not lowered.host


def test_configs_are_listed_as_a_loop_over_the_axes_has_them(truth: Truth) -> None:
    configs = [c for c in truth.lattice.configs if c["method"] == "full"]
    ordered = sorted(random.Random(0).sample(configs, len(configs)), key=lightness)
    assert ordered == sorted(configs, key=lightness)
    assert [c["precision"] for c in ordered] == sorted(
        (c["precision"] for c in ordered), key=["bf16", "bf16-mixed", "fp32"].index
    )
    assert [c["micro_batch"] for c in ordered[:3]] == [1, 1, 1] and ordered[-1]["micro_batch"] == 4


def test_a_problem_has_the_axes_on_which_configs_differ(truth: Truth, table: Recorded) -> None:
    assert {axis.name for axis in table.problem.axes} == {
        *("precision", "micro_batch", "checkpointing", "optimizer", "loss")
    }
    by_name = table.problem.values
    assert by_name["micro_batch"] == (1, 2, 4)
    assert by_name["optimizer"] == ("adamw-8bit", "adamw")
    assert table.problem.name == "made/full" and table.problem.memory_limit_bytes == LIMIT
