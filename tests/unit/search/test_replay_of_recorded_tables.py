"""Our search over tables of real trials, as benchmarks/RESULTS.md judges it: its figures must not get worse unseen."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autofit.bench.made_device import MadeDevice
from autofit.bench.made_search import OURS
from autofit.bench.made_search import searched as made_search
from autofit.operations.predicting import estimate_all
from autofit.operations.replay_problems import RECORDED, Tables
from autofit.search.foresight import Foresight
from autofit.search.replay.kept import searched
from autofit.search.replay.ours import job_of, search
from autofit.search.replay.recorded import Recorded
from autofit.search.replay.score import Score, score
from autofit.trial.site import installed_stack

SEEDS = 3


def foreseen(recorded: Recorded) -> Recorded:
    """With estimates of this problem's configs alone: those of a whole table take longer."""
    problem = recorded.problem

    @cache
    def foresee() -> Foresight:
        from autofit.estimate.speed import prior

        job = replace(job_of(problem), stack=installed_stack())
        found = estimate_all(job, problem.configs, memory_limit_bytes=problem.memory_limit_bytes, store=None)
        rates = prior(problem.hardware)
        return Foresight(predictions={config: e.timed(job, rates).prediction for config, e in found.items()})

    return replace(recorded, problem=replace(problem, foresee=foresee))


def problem_of(table: str, method: str) -> Recorded:
    """A problem of a recorded table, foreseen."""
    return foreseen({r.problem.method: r for r in Tables(files=(RECORDED / f"{table}.jsonl",)).problems()}[method])


def judged(recorded: Recorded) -> Score:
    """Our search."""
    return score(recorded, [searched(recorded, search, seed)[1] for seed in range(SEEDS)])


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
    found = judged(problem_of(table, method))
    closest, ended = found.reached[-1], found.ended
    assert closest.seeds == SEEDS
    assert closest.trials.median is not None and closest.trials.median <= 8
    assert ended is not None and ended.seeds == ended.within_stated == SEEDS
    assert ended.out_of_memory.median is not None and ended.out_of_memory.median <= 1
    assert ended.trials.median is not None and ended.trials.median <= 12


def test_where_every_config_that_may_fit_is_dear_there_is_an_answer_all_the_same() -> None:
    """Full fine-tuning in 2 GiB on a processor that emulates bf16: what is fast does not fit, and a trial of what fits
    takes a fifth of the time budget."""
    slow = MadeDevice.of("precision=bf16:30,precision=bf16-mixed:12")
    found = made_search(problem_of("cpu-2c-smollm2-135m", "full"), slow, OURS, 0, 600.0)
    assert found.trace.stated is not None
