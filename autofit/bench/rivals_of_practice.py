"""What people do by hand: double the micro-batch until it fails, or go down a checklist until something fits.

The fixed settings are those that published advice recommends for speed, chosen before any table was looked at.
"Methods and tools for efficient training on a single GPU" (transformers' documentation) has them: bf16 mixed precision,
fused AdamW, SDPA or FlashAttention and torch.compile are faster; checkpointing costs about 20 % and is for what does
not fit otherwise. Liger-Kernel's README says 20 % faster with its fused loss. Adapters keep the plain recipe's rank on
all linear layers (the QLoRA paper: on all layers, and then the rank matters little). A value that a table lacks is
skipped for the next one in the list. Where training methods are searched side by side, the most faithful comes first.

Guides say `bf16`, which in some trainers means pure bf16 and in others mixed precision. Each method runs by both
readings, the second under a name that ends in `-mixed`, so that the better one counts, whichever it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from autofit.bench.oracle import CannotRun, Oracle, SearchMethod
from autofit.bench.problem import Problem
from autofit.core.lattice import Config, Value
from autofit.core.outcome import Fits
from autofit.core.workload import METHODS

Settings = Mapping[str, Sequence[Value]]
"""By axis, the values to choose from, the best first. Where a table has none of them, the axis has its heaviest value:
nothing was turned on."""
HAND_PICKED: Settings = {
    "method": METHODS,
    "precision": ("bf16", "bf16-mixed", "fp16-mixed"),
    "optimizer": ("adamw", "adamw-8bit"),
    "attention": ("flash", "efficient", "sdpa", "eager"),
    "kernels": ("liger", "torch"),
    "loss": ("fused", "chunked", "full"),
    "compile": (True, False),
    "checkpointing": ("none",),
    "offload": ("none",),
    "sharding": ("none", "ddp", "zero1", "zero2"),
    "targets": ("all-linear",),
}
MIXED: Settings = {**HAND_PICKED, "precision": ("bf16-mixed", "fp16-mixed", "bf16")}
CHECKPOINTED = ("full", "every-2", "selective", "save-attention")
"""For when not even one sequence fits otherwise."""


def doubling(problem: Problem, oracle: Oracle, seed: int, *, picked: Settings) -> None:
    """Lightning's `BatchSizeFinder` in its mode `power`: from 2, doubled until memory runs out; halved if 2 does."""
    smallest, *larger = _micro_batches(problem)
    for settings in _in_turn(problem, picked):
        fitted = False
        for batch in [batch for batch in larger if batch >= 2] or [smallest]:
            if not _fits(oracle, settings_of(problem, settings, batch)):
                break
            fitted = True
        if fitted or _fits(oracle, settings_of(problem, settings, smallest)):
            return


def falling(problem: Problem, oracle: Oracle, seed: int, *, picked: Settings) -> None:
    """accelerate's own `find_executable_batch_size`: from the largest micro-batch, times 0.9 after every failure."""
    try:
        from accelerate.utils import find_executable_batch_size
    except ImportError as error:
        raise CannotRun(f"accelerate cannot be imported: {error}") from error
    for settings in _in_turn(problem, picked):

        def train(batch_size: int, settings: Settings = settings) -> None:
            if not _fits(oracle, settings_of(problem, settings, batch_size)):
                raise RuntimeError("CUDA out of memory.")

        try:
            find_executable_batch_size(train, starting_batch_size=_micro_batches(problem)[-1])()
        except RuntimeError:  # not even one sequence
            continue
        return


def checklist(problem: Problem, oracle: Oracle, seed: int, *, picked: Settings) -> None:
    """bf16, then checkpointing, then 8-bit Adam, then smaller micro-batches, then QLoRA, then offload: ends with the
    first config that fits, and compiles nothing. A step whose value the table lacks is skipped; so is QLoRA where full
    fine-tuning or LoRA alone is searched."""
    batches = _micro_batches(problem)
    config = settings_of(problem, {**picked, "compile": (False, True)}, batches[-1])
    steps: list[tuple[str, Value]] = [
        ("checkpointing", "full"),
        ("optimizer", "adamw-8bit"),
        *(("micro_batch", batch) for batch in reversed(batches[:-1])),
        ("method", "qlora"),
        ("offload", "optimizer"),
        ("offload", "params"),
    ]
    values = {axis.name: problem.values[axis.name] for axis in problem.axes}
    tried = _fits(oracle, config)
    for axis, value in steps:
        if tried:
            return
        if value in values.get(axis, ()):
            config = problem.config({**config.to_json(), axis: value})
            tried = _fits(oracle, config)


RIVALS: Mapping[str, SearchMethod] = {
    name + suffix: partial(method, picked=picked)
    for name, method in (("doubling-lightning", doubling), ("falling-accelerate", falling), ("checklist", checklist))
    for suffix, picked in (("", HAND_PICKED), ("-mixed", MIXED))
}


def settings_of(problem: Problem, settings: Settings, micro_batch: int) -> Config:
    """The best of the settings that the problem has, with the given micro-batch and the lowest rank there is."""
    chosen: dict[str, Value] = {"micro_batch": micro_batch}
    for axis in problem.axes:
        values = problem.values[axis.name]
        if not axis.numeric:
            chosen[axis.name] = next((v for v in settings.get(axis.name, ()) if v in values), values[-1])
        elif axis.name != "micro_batch":
            chosen[axis.name] = values[0]
    return problem.config(chosen)


def _in_turn(problem: Problem, picked: Settings) -> Iterator[Settings]:
    """The settings to try, one after the other: for each training method, without checkpointing and with it."""
    for method in problem.methods:
        for checkpointing in (picked["checkpointing"], CHECKPOINTED):
            yield {**picked, "checkpointing": checkpointing, "method": (method,)}


def _micro_batches(problem: Problem) -> list[int]:
    return sorted({config.number("micro_batch") for config in problem.configs})


def _fits(oracle: Oracle, config: Config) -> bool:
    """Whether it trains; every failure is taken for out of memory."""
    return isinstance(oracle.ask(config).outcome, Fits)
