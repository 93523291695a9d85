"""Our search over tables of real trials, as benchmarks/RESULTS.md judges it: its figures must not get worse unseen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from unit.bench.made_devices import searched as searched_on
from unit.bench.test_made_search import EMULATED_BF16

from autofit.bench.oracle import searched
from autofit.bench.ours import search
from autofit.bench.recorded import Recorded
from autofit.bench.score import Score, score
from autofit.bench.tables import RECORDED, predictions_of, problems_of, read

SEEDS = 2


def problem_of(table: str, method: str) -> Recorded:
    """A problem of a recorded table, with estimates of its configs alone: those of a whole table take longer."""
    (whole,) = read([RECORDED / f"{table}.jsonl"])
    recorded = next(r for r in problems_of([whole]) if r.problem.method == method)
    part = replace(whole, trials=tuple(trial for trial in whole.trials if trial.config in recorded.trials))
    return replace(recorded, problem=replace(recorded.problem, predictions=predictions_of(part)))


def judged(recorded: Recorded) -> Score:
    """Our search."""
    return score(recorded, [searched(recorded, search, seed) for seed in range(SEEDS)])


@pytest.mark.parametrize(
    ("table", "method"),
    [
        ("cpu-2c-pythia-160m", "full"),
        ("cpu-2c-pythia-160m", "qlora"),
        ("cpu-2c-pythia-160m", "any"),
        ("cpu-zen5-2c-smollm2-360m", "full"),
    ],
)
def test_the_best_of_a_recorded_table_is_found_in_a_few_trials(table: str, method: str) -> None:
    """To 1 %: after at most 8 trials, of which at most one runs out of memory (medians). Most full fine-tunings of the
    tables run out, and no QLoRA config does. A whole table has all methods, as a search gets
    them by default. The limit of the last cuts through what its best configs need."""
    result = judged(problem_of(table, method))
    ended = result.ended
    assert result.near == SEEDS
    assert result.trials.median is not None and result.trials.median <= 8
    assert ended is not None and ended.seeds == ended.within_stated == SEEDS
    assert ended.out_of_memory.median is not None and ended.out_of_memory.median <= 1
    assert ended.trials.median is not None and ended.trials.median <= 12


def test_where_every_config_that_may_fit_is_dear_there_is_an_answer_all_the_same() -> None:
    """Full fine-tuning in 2 GiB on a processor that emulates bf16: what is fast does not fit, and a trial of what fits
    takes a fifth of the time budget."""
    _, trace = searched_on(problem_of("cpu-2c-smollm2-135m", "full"), EMULATED_BF16, 0)
    assert trace.stated is not None
