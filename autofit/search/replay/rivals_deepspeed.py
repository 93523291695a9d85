"""DeepSpeed's own tuners, imported from the installed package and driven over a table with its defaults.

They walk a list of experiments, each with its DeepSpeed config. Here that list is the problem's configs in the order in
which a loop over the axes gives them; micro-batch and accumulation have DeepSpeed's own keys, and every other axis is
encoded as a number that orders its values by memory, because the model-based tuner looks at numbers only. Where
training methods are searched side by side, the throughput that they are told is `Problem.merit`. Everything else is
theirs: `tune` with its defaults (at most 50 trials, ending after 5 without a better one), the files in which
experiments and results are passed, and the choice of the best. Only the code that would launch a job is replaced, by a
look-up.

Known flaws, left as they are: the model-based tuner marks its first configs as visited before it has measured them, and
its cost model needs xgboost, without which it cannot run at all.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from autofit.outcome import Fits
from autofit.search.replay.method import CannotRun, SearchMethod
from autofit.search.replay.oracle import Answer, Oracle
from autofit.search.replay.problem import Problem, place_in

METRIC = "throughput"
"""DeepSpeed's default; of its other metrics, one keeps the slowest and one finds no result."""
TRIALS = 50
EARLY_STOPPING = 5
"""This and `TRIALS` are the defaults of deepspeed/autotuning/constants.py."""


def rival(tuner: str) -> SearchMethod:
    """The search by the tuner class of this name."""

    def search(problem: Problem, oracle: Oracle, seed: int) -> None:
        tuners, scheduler = _imported()
        with _seeded(seed), tempfile.TemporaryDirectory(prefix="autofit-replay-") as folder:
            manager = _manager(scheduler, problem, oracle, Path(folder))
            experiments = [_experiment(problem, number) for number in range(len(problem.configs))]
            space = {axis.name: list(problem.values(axis)) for axis in problem.axes}
            arguments = [experiments, manager, METRIC, *([space] if tuner == "ModelBasedTuner" else [])]
            try:
                made = getattr(tuners, tuner)(*arguments)
            except AssertionError as error:  # how DeepSpeed says that xgboost is missing
                raise CannotRun(str(error)) from error
            made.tune(sample_size=1, n_trials=TRIALS, early_stopping=EARLY_STOPPING)
            if manager.failure is not None:
                raise manager.failure  # `tune` treats every failure as its end

    return search


RIVALS: Mapping[str, SearchMethod] = {
    "deepspeed-grid": rival("GridSearchTuner"),
    "deepspeed-random": rival("RandomTuner"),
    "deepspeed-model-based": rival("ModelBasedTuner"),
}


def _imported() -> tuple[Any, Any]:
    """DeepSpeed's tuner and scheduler modules. What their import prints does not belong on standard output."""
    try:
        with redirect_stdout(sys.stderr):
            from deepspeed.autotuning import scheduler, tuner
    except ImportError as error:
        raise CannotRun(f"DeepSpeed cannot be imported: {error}") from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return tuner, scheduler


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds the process-wide generators, from which the tuners draw, and restores them at the end."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _experiment(problem: Problem, number: int) -> dict[str, Any]:
    config = problem.configs[number]
    micro_batch = config.number("micro_batch")
    others = [axis for axis in problem.axes if axis.name != "micro_batch"]
    return {
        "name": f"config-{number}",
        "ds_config": {
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": problem.workload.batch_per_device // micro_batch,
            "techniques": {axis.name: place_in(axis, config) for axis in others},
            "autotuning": {},  # where the scheduler writes the path of the metrics
        },
    }


def _manager(scheduler: Any, problem: Problem, oracle: Oracle, folder: Path) -> Any:
    """DeepSpeed's resource manager, with jobs looked up instead of launched."""

    class Manager(scheduler.ResourceManager):  # type: ignore[misc]
        failure: Exception | None = None

        def run(self) -> None:
            """Look up what was scheduled, instead of launching it."""
            try:
                for experiment in self.experiment_queue:
                    self._look_up(experiment)
            except Exception as error:
                self.failure = error
                raise

        def _look_up(self, experiment: dict[str, Any]) -> None:
            number = int(experiment["name"].removeprefix("config-"))
            answer = oracle.ask(problem.configs[number])
            failed = None if isinstance(answer.outcome, Fits) else answer.outcome.kind
            if failed is None:
                path = Path(experiment["ds_config"]["autotuning"]["metric_path"])
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps({METRIC: problem.merit(problem.configs[number], _speed(answer))}))
            self.finished_experiments[experiment["exp_id"]] = (experiment, failed)

    experiments, results = folder / "experiments", folder / "results"
    experiments.mkdir()
    return Manager(
        args=None,
        hosts=["localhost"],
        num_gpus_per_node=1,
        results_dir=str(results),
        exps_dir=str(experiments),
        arg_mappings=None,
    )


def _speed(answer: Answer) -> float:
    assert isinstance(answer.outcome, Fits)
    return answer.outcome.measurement.tokens_per_second
