"""The real micro-step of the model, cut to a few decoder layers: what the rates of single operations leave out."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from autofit.catalog.models import ModelShape, shape
from autofit.core.device.probe import MeasuredStep
from autofit.core.device.work_kinds import product
from autofit.core.lattice import Config
from autofit.core.outcome import StepWork
from autofit.core.units import format_bytes
from autofit.probe.bench import FORMATS, Bench
from autofit.techniques import Job, complete
from autofit.training.build import build
from autofit.training.decoder import decoder_layers, replace_layers
from autofit.training.weights import unwrap

DEPTHS = ((8, 2), (4, 1), (2, 1))
"""Decoder layers, the deepest that has room."""
TOKENS = (128,), (4096, 1024)
"""On a processor and on an accelerator, the most that have room: too few would show nothing but launches."""
MOST_SECONDS, LEAST_ROUNDS, MOST_ROUNDS = 2.0, 2, 8
"""Of the repeats, all depths together; a round is one of each."""


def config_for(seconds_per: Mapping[str, float], *, accelerator: bool) -> Config:
    """What is run, in the format whose products are the fastest: on a processor adapters, of which the most fits; on an
    accelerator the full model, whose arithmetic hides its launches, as adapters' seldom does."""
    speeds = {name: seconds_per.get(product(name, "nt")) for name in ("fp32", "bf16")}
    wide, narrow = speeds["fp32"], speeds["bf16"]
    precision = "bf16" if wide is None or (narrow is not None and narrow < wide) else "fp32"
    method = "full" if accelerator else "lora"
    return complete({"method": method, "precision": precision, "micro_batch": 1, "checkpointing": "none"})


def measure(bench: Bench, job: Job, config: Config) -> Iterator[MeasuredStep | dict[str, float]]:
    """The micro-step at each depth, the deepest first, with the work that a trace counts. The update, whose time is
    that of its bytes, is not part of it.

    The depths are run in turn, so that what slows the machine for a while slows all of them. Nothing is yielded now and
    then as a sign of life: a slow device may take many seconds.
    """
    bench.empty()  # of the buffers of the other parts
    tokens_at_once, depths = sizes_for(shape(job.model), TOKENS[bench.accelerator], config, bench.room())
    job = replace(job, workload=replace(job.workload, seq_len=tokens_at_once))
    works = _works(config, job, depths)
    yield {}
    step = build(config, job, bench.device, layers=range(depths[0]))
    tokens = torch.randint(step.vocabulary, (1, tokens_at_once), device=bench.device)
    ((inputs, labels),) = step.split(tokens)
    targets = tokens_at_once - 1
    model = step.module.model
    every = decoder_layers(model)

    def at(depth: int) -> float:
        replace_layers(model, every[:depth])
        unwrap(model).config.get_text_config().num_hidden_layers = depth
        return bench.once(lambda: step.micro_step(inputs, labels, targets, last=True))

    rounds: list[list[float]] = []
    while not _enough(rounds):
        rounds.append([])
        for depth in depths:
            rounds[-1].append(at(depth))
            yield {}
    for place, depth in enumerate(depths):
        # The first round loads kernels and fills caches. The median, because trials report theirs.
        usual = statistics.median(taken[place] for taken in rounds[1:] or rounds)
        yield MeasuredStep(config=config.to_json(), layers=depth, seconds=usual, work=works.get(depth))


def _enough(rounds: list[list[float]]) -> bool:
    """Whether no further round is needed: the first counts only where it is slow."""
    # A first round that takes as long counts itself: what a step does only once is small beside that.
    if not rounds or sum(rounds[0]) >= 10.0:
        return bool(rounds)
    spent = sum(map(sum, rounds[1:]))
    return len(rounds) > LEAST_ROUNDS and (spent >= MOST_SECONDS or len(rounds) > MOST_ROUNDS)


def _works(config: Config, job: Job, depths: list[int]) -> dict[int, StepWork]:
    from autofit.estimate.estimator import Estimator
    from autofit.estimate.tracing.recorder import NotTraced

    try:
        return Estimator(job, None).micro_step_works(config, depths)
    except NotTraced:
        return {}


def sizes_for(model: ModelShape, at_once: Sequence[int], config: Config, room_bytes: float) -> tuple[int, list[int]]:
    """How many of the numbers of tokens `at_once`, and which depths of a model, can be run in so many bytes: the most
    tokens, then the deepest, which comes first. Raises `MemoryError` if none can."""
    for tokens in at_once:
        for depths in DEPTHS:
            possible = sorted({min(layers, model.layers) for layers in depths}, reverse=True)
            needed = bytes_of(model, tokens, config, possible[0])
            if needed <= room_bytes:
                return tokens, possible
    raise MemoryError(f"out of memory: it takes {format_bytes(needed)}, and {format_bytes(int(room_bytes))} are left")


def bytes_of(model: ModelShape, tokens: int, config: Config, layers: int) -> int:
    """What a step of the model cut to so many layers takes at least: its weights with the gradients of those that are
    trained, and logits with their gradients."""
    beside = model.embedding_parameters * (1 if model.tied_embeddings else 2)
    weights = beside + (model.parameters - beside) * layers // model.layers
    # A logit takes 12 bytes: of it in fp32, of what the loss makes of it, and of its gradient.
    held = FORMATS[config.text("precision")].itemsize * (2 if config["method"] == "full" else 1)
    return held * weights + 12 * tokens * model.vocabulary_size
