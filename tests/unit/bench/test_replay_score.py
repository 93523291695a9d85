"""Scores of traces that were made by hand."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
from unit.bench.made_tables import of_outcomes, trace
from unit.operations.made_trials import crashed, fits, out_of_memory
from unit.search.made_truth import Truth

from autofit.bench.oracle import Stated
from autofit.bench.recorded import Recorded
from autofit.bench.score import Quantiles, Share, regret, score, trials_to
from autofit.core.lattice import Config
from autofit.core.units import GIB

OUTCOMES = (fits(1.0, 100), fits(0.5, 50), fits(1.5, 96), fits(0.8, 99.5), out_of_memory(), out_of_memory(), crashed())
"""The frontier: 50 tokens/s at 0.5 GiB, 99.5 at 0.8, 100 at 1."""


@pytest.fixture
def configs(truth: Truth) -> list[Config]:
    """As many as there are outcomes."""
    return [c for c in truth.lattice.configs if c["method"] == "full"][: len(OUTCOMES)]


@pytest.fixture
def table(truth: Truth, configs: list[Config]) -> Recorded:
    """A table of them, under 2 GiB."""
    return of_outcomes(truth, dict(zip(configs, OUTCOMES, strict=True)))


def test_the_truth_of_a_table(table: Recorded, configs: list[Config]) -> None:
    assert table.best.config == configs[0]
    assert {p.config for p in table.frontier} == {configs[0], configs[1], configs[3]}
    assert table.out_of_memory == 2
    assert table.reference_bytes == pytest.approx(1.1 * 1.5 * GIB)


def test_when_the_best_was_near(table: Recorded, configs: list[Config]) -> None:
    made = trace(table, [configs[i] for i in (4, 1, 2, 6, 3, 0)], seconds=2.0)
    assert trials_to(made, table.best) == 5
    result = score(table, [made])
    assert (result.near, result.trials, result.seconds) == (
        1,
        Quantiles(median=5, p90=5),
        Quantiles(median=10.0, p90=10.0),
    )
    assert result.out_of_memory.median == 1  # the crash is none


def test_out_of_memory_counts_until_the_best_is_there(table: Recorded, configs: list[Config]) -> None:
    early = trace(table, [configs[i] for i in (0, 4, 5)])
    late = trace(table, [configs[i] for i in (4, 5, 1)])
    assert score(table, [early]).out_of_memory.median == 0
    assert score(table, [late]).out_of_memory.median == 2


def test_what_was_never_reached_is_no_number(table: Recorded, configs: list[Config]) -> None:
    reaches, never = trace(table, [configs[0]]), trace(table, [configs[1]])
    for traces, median, p90, seeds in (
        ([reaches] * 9 + [never], 1, 1, 9),
        ([reaches] * 8 + [never] * 2, 1, None, 8),
        ([reaches] * 5 + [never] * 5, None, None, 5),  # half of them is not more than half
        ([never], None, None, 0),
    ):
        result = score(table, traces)
        assert (result.trials, result.near) == (Quantiles(median=median, p90=p90), seeds)
        assert (result.seconds.median is None) == (median is None)
    assert math.isinf(regret(trace(table, [configs[4]]).runs, table.best))
    assert regret(never.runs, table.best) == pytest.approx(0.5)


def test_the_share_of_the_frontiers_area(table: Recorded, configs: list[Config]) -> None:
    made = trace(table, [configs[i] for i in (4, 1, 0, 3)])
    most = 1.1 * 1.5
    whole = (most - 0.5) * 50 + (most - 0.8) * 49.5 + (most - 1.0) * 0.5
    without = (most - 0.5) * 50 + (most - 1.0) * 50
    shares = [table.share_of_frontier(made.runs[:trials]) for trials in (1, 2, 3, 4, 40)]
    assert shares == pytest.approx([0.0, (most - 0.5) * 50 / whole, without / whole, 1.0, 1.0])
    ten = score(table, [made] * 8 + [trace(table, [configs[4]])] * 2)
    assert ten.hypervolume[0] == Share(trials=5, median=1.0, p90=0.0)


def test_a_table_of_one_config_at_its_limit(truth: Truth, configs: list[Config]) -> None:
    full = of_outcomes(truth, {configs[0]: fits(2.0, 100), configs[1]: out_of_memory()})
    assert full.share_of_frontier([full.trials[configs[1]]]) == 0.0
    assert full.share_of_frontier([full.trials[configs[0]]]) == 1.0


def test_only_searches_that_ended_themselves_are_judged_by_their_end(table: Recorded, configs: list[Config]) -> None:
    cut = trace(table, configs)
    assert score(table, [cut]).ended is None
    itself = trace(table, [configs[4], configs[2]], seconds=3.0, stopped=True)
    ended = score(table, [cut, itself]).ended
    assert ended is not None and ended.seeds == 1
    assert (ended.trials.median, ended.seconds.median, ended.out_of_memory.median) == (2, 6.0, 1)
    assert ended.regret.median == pytest.approx(0.04)
    document = asdict(score(table, [cut, itself]))
    assert document["ended"]["seeds"] == 1 and document["seeds"] == 2
    assert [entry["trials"] for entry in document["hypervolume"]] == [5, 10, 20, 40]


def test_what_a_search_says_of_its_winner_is_held_against_the_table(table: Recorded, configs: list[Config]) -> None:
    """The recommended config counts, whatever else had run: noise may have chosen the slower one."""
    itself = trace(table, [configs[0], configs[2]], stopped=True)
    best, fourth = (configs[0], 0.0), (configs[2], 0.04)
    for (config, regret_), bound, holds in ((best, 0.0, 1), (fourth, 0.05, 1), (fourth, 0.03, 0)):
        said = replace(itself, stated=Stated(config=config, regret_bound=bound))
        ended = score(table, [itself, said]).ended
        assert ended is not None and ended.stated == Quantiles(median=bound, p90=bound)
        assert ended.within_stated == holds == int(regret_ <= bound)
        assert ended.recommended is not None and ended.recommended.p90 == pytest.approx(regret_)
        assert ended.regret.p90 == 0.0, "the best had run"
    ended = score(table, [itself]).ended
    assert ended is not None and ended.recommended is ended.stated is ended.within_stated is None


def test_a_recommended_config_of_another_training_method_is_no_answer(truth: Truth, configs: list[Config]) -> None:
    other = next(config for config in truth.lattice.configs if config["method"] == "lora")
    table = of_outcomes(truth, {configs[0]: fits(1.0, 100), other: fits(0.5, 200)}, method="any")
    made = trace(table, [configs[0], other], stopped=True)
    ended = score(table, [replace(made, stated=Stated(config=other, regret_bound=0.0))]).ended
    assert ended is not None and ended.recommended == Quantiles(median=None, p90=None)
    assert ended.within_stated == 1, "what is stated is of its own method"
