"""The real training step of the model, cut to a few decoder layers: what the rates of single operations leave out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from autofit.device_probe import MeasuredStep
from autofit.lattice import Config
from autofit.outcome import StepWork
from autofit.probe.bench import Bench
from autofit.techniques import Job, complete
from autofit.training.build import build
from autofit.training.decoder import decoder_layers, keep_layers
from autofit.work_kinds import product

LAYERS = (4, 2)
TOKENS = 256
MOST_SECONDS = 0.8
"""Of the repeats at one depth."""


def config_for(seconds_per: Mapping[str, float]) -> Config:
    """What is run: adapters, of which the most fits, in the format whose products are the fastest."""
    speeds = {name: seconds_per.get(product(name, "nt")) for name in ("fp32", "bf16")}
    wide, narrow = speeds["fp32"], speeds["bf16"]
    precision = "bf16" if wide is None or (narrow is not None and narrow < wide) else "fp32"
    values = {"method": "lora", "precision": precision, "micro_batch": 1, "checkpointing": "none"}
    return complete(values)


def measure(bench: Bench, job: Job, config: Config) -> Iterator[MeasuredStep]:
    """The step at each depth, the deepest first: a micro-step and an update, with the work that a trace counts."""
    deepest = min(max(LAYERS), _depth(job))
    step = build(config, job, bench.device, layers=range(deepest))
    tokens = torch.randint(step.vocabulary, (1, job.workload.seq_len), device=bench.device)
    ((inputs, labels),) = step.split(tokens)
    targets = job.workload.seq_len - 1
    for layers in LAYERS:
        if layers > deepest:
            continue
        if layers < len(decoder_layers(step.module.model)):
            keep_layers(step.module.model, range(layers))
        micro, update = _timed(bench, lambda: step.micro_step(inputs, labels, targets, last=True), step.update)
        yield MeasuredStep(
            config=config.to_json(),
            layers=layers,
            micro_step_seconds=micro,
            update_seconds=update,
            work=_work(config, job, layers),
        )


def _timed(bench: Bench, micro_step: Callable[[], object], update: Callable[[], object]) -> tuple[float, float]:
    """The least seconds of each, over a few steps after one that does not count."""
    times: list[tuple[float, float]] = []
    spent = 0.0
    while len(times) < 2 or (spent < MOST_SECONDS and len(times) < 6):
        times.append((bench.once(micro_step), bench.once(update)))
        spent += sum(times[-1])
    return min(micro for micro, _ in times[1:]), min(update for _, update in times[1:])


def _work(config: Config, job: Job, layers: int) -> StepWork | None:
    from autofit.estimate.estimator import Estimator
    from autofit.estimate.recorder import NotTraced

    try:
        return Estimator(job, None, layers=layers).work(config)
    except NotTraced:
        return None


def _depth(job: Job) -> int:
    from autofit.catalog.models import shape

    return shape(job.model).layers
