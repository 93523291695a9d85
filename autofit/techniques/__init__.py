"""The lattice's axes: one file per technique, and this registry of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from autofit.catalog.hardware import Card
from autofit.catalog.models import Model, shape
from autofit.core.device.hardware import Hardware
from autofit.core.errors import UsageError
from autofit.core.lattice import Axis, Config, Value, values_in
from autofit.core.workload import Effect, Goal
from autofit.techniques import habits
from autofit.techniques.axes.attention import Attention
from autofit.techniques.axes.batching import Batching
from autofit.techniques.axes.checkpointing import Checkpointing
from autofit.techniques.axes.compilation import Compilation
from autofit.techniques.axes.kernels import Kernels
from autofit.techniques.axes.loss import Loss
from autofit.techniques.axes.method import Method, Rank, Targets
from autofit.techniques.axes.micro_batch import MicroBatch
from autofit.techniques.axes.mlp import Mlp
from autofit.techniques.axes.optimizer import Optimizer
from autofit.techniques.axes.precision import Precision
from autofit.techniques.axes.precision import mixed_precision as mixed_precision
from autofit.techniques.axes.sharding import Offload, Sharding
from autofit.techniques.axes.sharding import needs_process_group as needs_process_group
from autofit.techniques.axes.update import Update
from autofit.techniques.job import Job as Job
from autofit.techniques.selective import budget
from autofit.techniques.technique import Part as Part
from autofit.techniques.technique import Technique
from autofit.techniques.trainer_names import not_a_value, not_an_axis

TECHNIQUES: tuple[Technique, ...] = (
    Method(),
    Rank(),
    Targets(),
    Precision(),
    MicroBatch(),
    Batching(),
    Checkpointing(),
    Optimizer(),
    Update(),
    Attention(),
    Kernels(),
    Mlp(),
    Loss(),
    Compilation(),
    Offload(),
    Sharding(),
)
"""One technique per axis, in the order in which they are applied in a build."""

AXES: tuple[Axis, ...] = tuple(t.axis for t in TECHNIQUES)
AXIS: Mapping[str, Axis] = {axis.name: axis for axis in AXES}
"""Each axis by its name."""


def lightness(config: Config) -> tuple[int, ...]:
    """A sort key under which no config precedes one that is claimed to need less memory."""
    return tuple(axis.place(axis.of(config)) for axis in AXES)


def affecting(config: Config, *parts: Part, sizes: bool = False) -> Config:
    """The values of `config` that these parts of its step depend on; without `sizes`, none that only scales them."""
    left_out = (
        t.axis.name
        for t in TECHNIQUES
        if (t.scales and not sizes) or not any(t.affects(part, config) for part in parts)
    )
    return config.without(*left_out)


def unsupported(config: Config, job: Job) -> str | None:
    """Why `config` cannot work for `job`; None if it can. Determined without running anything."""
    for technique in TECHNIQUES:
        if technique.applies(config):
            reason = technique.unsupported(config, job)
            if reason is not None:
                return reason
    return habits.unsupported(config, job)


def holds(job: Job) -> Callable[[Config, Config], bool]:
    """For a `Lattice`: a test of whether the axes' claims about two configs, the lighter one first, hold for `job`."""
    trainer = job.workload.trainer

    def every_technique_agrees(lighter: Config, heavier: Config) -> bool:
        # The claims are about the configs' own number formats: where a trainer changes those of one, none is made.
        if habits.of_formats(lighter, trainer) != habits.of_formats(heavier, trainer):
            return False
        # Torch may choose to keep the results of more operations, though each takes less.
        of_layers = ("method", "rank", "targets", "precision", "attention")
        if budget(lighter) < 1 and any(lighter.get(axis) != heavier.get(axis) for axis in of_layers):
            return False
        return all(
            lighter.get(t.axis.name) == heavier.get(t.axis.name) or t.holds(lighter, heavier, job) for t in TECHNIQUES
        )

    return every_technique_agrees


@lru_cache(maxsize=10_000)
def only_slower(config: Config) -> tuple[Config, ...]:
    """The configs that differ from `config` on one axis and do all of its work and more: they cannot train faster.

    A compiled config has none: the compiler decides itself what to keep and what to recompute.
    """
    if config.get("compile") is True:
        return ()
    return tuple(
        config.replace(**{axis.name: slower})
        for axis in AXES
        for slower, faster in sorted(axis.slower, key=str)
        if faster == axis.of(config)
    )


def complete(values: Mapping[str, object], defaults: Mapping[str, Value] | None = None) -> Config:
    """A full config from the given values; absent axes are filled from `defaults`, then from the plain recipe.

    Raises `UsageError` for an unknown axis or value, and for `rank` or `targets` with method `full`.
    """
    for name, value in values.items():
        if name not in AXIS:
            raise not_an_axis(name, value, AXIS)
    checked = {name: AXIS[name].check(value) for name, value in values.items()}
    filled: dict[str, Value] = {}
    for technique in TECHNIQUES:
        name = technique.axis.name
        if name != "method" and not technique.applies(Config.of(filled)):
            if name in checked:
                raise UsageError(
                    f"{name} does not apply to method {filled['method']}: leave it out, or use method=lora"
                )
            continue
        fallback = (defaults or {}).get(name, technique.axis.recipe)
        value = checked.get(name, fallback)
        if value is not None and technique.axis.is_stated(value):
            filled[name] = value
    return Config.of(filled)


def recipe(on: Hardware | Card, model: Model, trainer: str | None = None) -> Mapping[str, Value]:
    """The values of the plain recipe that a device, a model or a trainer decides, for `complete`. Raises `UsageError`
    for a model that cannot be built."""
    attention: Mapping[str, Value] = {} if shape(model).sdpa else {"attention": "eager"}
    return {"precision": mixed_precision(on), **habits.trainer_by_name(trainer).usual, **attention}


def parse(text: str) -> dict[str, object]:
    """The values that `axis=value,axis=value` spells; raises `UsageError` naming the nearest valid ones."""
    values: dict[str, object] = {}
    errors: list[UsageError] = []
    for name, value in values_in(text).items():
        if name not in AXIS:
            errors.append(not_an_axis(name, value, AXIS))
            continue
        try:
            values[name] = AXIS[name].parse(value)
        except UsageError as error:
            errors.append(not_a_value(error, AXIS[name], value))
    if errors:
        raise errors[0] if len(errors) == 1 else UsageError("; ".join(map(str, errors)))
    return values


def family(config: Config) -> str:
    """What configs must share to train identically up to rounding order: the value of every axis that can change more.

    Within a family a dominated config is useless, whatever the user allows.
    """
    axes = [axis for axis in AXES if axis.numeric or not axis.exact]
    return ",".join(f"{a.name}={config[a.name]}" for a in axes if a.name in config and a.name != "micro_batch")


def most_effect(axis: Axis) -> Effect:
    """The most that a value of the axis changes; a rank, like a method, is part of what the user asks for."""
    return Effect.TRAINING if axis.name == "rank" else max(axis.effects.values(), default=Effect.EXACT)


def changes(config: Config, goal: Goal | None = None) -> tuple[str, ...]:
    """How `config` departs from the plain recipe of `goal` by more than rounding order, one sentence per axis.

    Without a goal, the comparison is with the default recipe: full fine-tuning, or else adapters of the lowest usual
    rank.
    """
    goal = goal or Goal()
    sentences = []
    for technique in TECHNIQUES:
        name = technique.axis.name
        effect = technique.effect(config, goal) if name in config else Effect.EXACT
        if effect is not Effect.EXACT:
            affected = "the training itself" if effect is Effect.TRAINING else "numerical precision"
            sentences.append(f"{name}={config[name]} instead of {technique.plain(goal)} changes {affected}")
    return tuple(sentences)
