"""The real micro-step of the model, cut to a few decoder layers: what the rates of single operations leave out."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from autofit.catalog.model_shape import ModelShape
from autofit.catalog.models import shape
from autofit.core.device.probe import MeasuredStep
from autofit.core.device.work_kinds import product
from autofit.core.lattice import Config
from autofit.core.prediction import StepWork
from autofit.core.units import format_bytes
from autofit.probe.bench import FORMATS, Bench
from autofit.techniques import Job, complete
from autofit.techniques.adapters import unwrap
from autofit.techniques.axes.precision import is_mixed, product_format
from autofit.training.build import build
from autofit.training.decoder import decoder_layers, replace_layers

DEPTHS = ((8, 2), (4, 1), (2, 1))
"""Decoder layers, the deepest that has room."""
TOKENS = (128,), (4096, 1024)
"""On a processor and on an accelerator, the most that have room: too few would show nothing but launches."""
MOST_SECONDS, LEAST_ROUNDS = 2.0, 2
"""Of the repeats, all depths together; a round is one of each."""
MOST_ROUNDS = 8, math.inf
"""On a processor and on an accelerator, whose power limit shows only after a while."""
PRECISIONS = {"bf16": "bf16", "fp16": "fp16-mixed", "fp32": "fp32"}
"""The config's precision for products in each format."""


def configs_for(seconds_per: Mapping[str, float], *, accelerator: bool) -> list[Config]:
    """What may be run, the first that has room, in the format whose products are the fastest: on a processor adapters,
    of which the most fits; on an accelerator rather the full model, whose arithmetic hides its launches, as adapters'
    seldom does."""
    seconds = {name: seconds_per.get(product(name, "nt"), math.inf) for name in ("bf16", "fp32", "fp16")}
    # Where bf16 is no emulation, it is about as fast as fp16: rather that, which needs no loss scaling.
    fastest = min(seconds, key=lambda name: seconds[name] * (1.0 if name == "fp16" else 0.8))
    values = {"precision": PRECISIONS[fastest], "micro_batch": 1, "checkpointing": "none"}
    return [complete({"method": method, **values}) for method in (("full", "lora") if accelerator else ("lora",))]


def measure(bench: Bench, job: Job, configs: Sequence[Config]) -> Iterator[MeasuredStep | dict[str, float]]:
    """The micro-step at each depth, the deepest first, with the work that a trace counts. The update, whose time is
    that of its bytes, is not part of it.

    The depths are run in turn, so that what slows the machine for a while slows all of them. Nothing is yielded now and
    then as a sign of life: a slow device may take many seconds.
    """
    bench.empty()  # of the buffers of the other parts
    possible = sizes_for(shape(job.model), TOKENS[bench.accelerator], configs, bench.room())
    for place, (config, tokens, depths) in enumerate(possible, start=1):
        bench.empty()  # of a larger step
        sized = replace(job, workload=replace(job.workload, seq_len=tokens))
        try:
            yield from _measure(bench, sized, config, depths)
            return
        except torch.OutOfMemoryError:
            if place == len(possible):
                raise


def _measure(bench: Bench, job: Job, config: Config, depths: list[int]) -> Iterator[MeasuredStep | dict[str, float]]:
    works = _works(config, job, depths)
    yield {}
    step = build(config, job, bench.device, layers=range(depths[0]))
    tokens = torch.randint(step.vocabulary, (1, job.workload.seq_len), device=bench.device)
    ((inputs, labels),) = step.split(tokens)
    targets = job.workload.seq_len - 1
    model = step.module.model
    layers = decoder_layers(model)

    def at(depth: int) -> float:
        replace_layers(model, layers[:depth])
        unwrap(model).config.get_text_config().num_hidden_layers = depth
        return bench.timed(lambda: step.micro_step(inputs, labels, targets, last=True))

    rounds: list[list[float]] = []
    while not _enough(rounds, MOST_ROUNDS[bench.accelerator]):
        rounds.append([])
        for depth in depths:
            rounds[-1].append(at(depth))
            yield {}
    # The first round loads kernels and fills caches; in the first half, an accelerator may not yet be as hot as later.
    settled = rounds[len(rounds) // 2 if bench.accelerator else 1 :] or rounds
    for place, depth in enumerate(depths):
        median = statistics.median(seconds[place] for seconds in settled)  # as trials report theirs
        yield MeasuredStep(config=config.to_json(), layers=depth, seconds=median, work=works.get(depth))


def _enough(rounds: list[list[float]], most_rounds: float) -> bool:
    """Whether no further round is needed: the first counts only where it is slow."""
    # A first round that takes as long counts itself: what a step does only once is small beside that.
    if not rounds or sum(rounds[0]) >= 10.0:
        return bool(rounds)
    spent = sum(map(sum, rounds[1:]))
    return len(rounds) > LEAST_ROUNDS and (spent >= MOST_SECONDS or len(rounds) > most_rounds)


def _works(config: Config, job: Job, depths: list[int]) -> dict[int, StepWork]:
    from autofit.estimate.estimator import Estimator
    from autofit.estimate.tracing.recorder import NotTraced

    try:
        return Estimator(job, None).micro_step_works(config, depths)
    except NotTraced:
        return {}


def sizes_for(
    model: ModelShape, token_counts: Sequence[int], configs: Sequence[Config], room_bytes: float
) -> list[tuple[Config, int, list[int]]]:
    """Which configs can be run in so many bytes, with which of `token_counts` and at which depths of the model, the
    deepest first: the first config and the most tokens first. Raises `MemoryError` if none can."""
    sizes = []
    for config, tokens, depths in itertools.product(configs, token_counts, DEPTHS):
        possible = sorted({min(layers, model.layers) for layers in depths}, reverse=True)
        needed = bytes_of(model, tokens, config, possible[0])
        if needed <= room_bytes and (config, tokens, possible) not in sizes:
            sizes.append((config, tokens, possible))
    if not sizes:
        raise MemoryError(
            f"out of memory: it takes {format_bytes(needed)}, and {format_bytes(int(room_bytes))} are left"
        )
    return sizes


def bytes_of(model: ModelShape, tokens: int, config: Config, layers: int) -> int:
    """What a step of the model cut to so many layers takes: its weights, the gradients of those that are trained with
    the head's once more while it is added up, logits with their gradients, and what layers keep for the backward pass.

    A layer keeps some two numbers for each output of its products: 0.87 GB in one of llama-3.1-8b with 4,096 tokens,
    where an H200 showed 0.81 (benchmarks/recorded/h200).
    """
    embeddings = model.embedding_parameters * (1 if model.tied_embeddings else 2)
    weights = embeddings + (model.parameters - embeddings) * layers // model.layers
    size = FORMATS[product_format(config)].itemsize
    head = model.vocabulary_size * model.hidden_size
    in_layers = model.active_matmul_parameters - head
    activations = 2 * size * tokens * in_layers // model.hidden_size * layers // model.layers
    # A logit takes 12 bytes: of it in fp32, of what the loss makes of it, and of its gradient.
    trained = weights + head if config["method"] == "full" else 0
    held = size * (weights + trained)
    if trained and is_mixed(config):  # fp32, and a copy of the weights in the format of the products
        held = 4 * (weights + trained) + size * weights
    return held + activations + 12 * tokens * model.vocabulary_size
