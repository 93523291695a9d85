"""From a search space and a goal to the lattice that a search may walk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from autofit.catalog import space as spaces
from autofit.catalog.models import shape
from autofit.catalog.space import Space
from autofit.core.device.hardware import Hardware
from autofit.core.errors import UsageError
from autofit.core.lattice import Config, Lattice
from autofit.core.workload import Effect, Goal, check_count
from autofit.techniques import AXES, TECHNIQUES, Job, holds, mixed_precision, unsupported
from autofit.techniques.axes.attention import keeps_scores
from autofit.techniques.axes.batching import Batching
from autofit.techniques.axes.loss import chunks_are_one
from autofit.techniques.axes.method import nearest_ranks
from autofit.techniques.habits import trainer_by_name

_TECHNIQUE_OF = {technique.axis.name: technique for technique in TECHNIQUES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowed:
    """A lattice, and what was left out of it."""

    lattice: Lattice
    unsupported: Mapping[str, int] = field(default_factory=dict)
    """Reason -> number of configs of the space that cannot work here for that reason."""
    beyond_goal: int = 0
    """Number of configs that would change more than the user allows."""


def default_space(hardware: Hardware, devices: int) -> str:
    """The space to search if none is named."""
    if devices > 1:
        return "multi-cpu" if hardware.kind == "cpu" else "multi-gpu"
    return "cpu" if hardware.kind == "cpu" else "single-gpu"


def load_space(name: str) -> Space:
    """A built-in space by name, or one from a file."""
    return spaces.load(name, AXES)


def within(goal: Goal, configs: Iterable[Config]) -> Callable[[Config], bool]:
    """Says whether a config stays within the user's training goal; it judges all configs of a family alike.

    The method is the user's choice and not judged. Nor is the lowest rank that the goal accepts or, if none of
    `configs`, which are all there are, has it, the next higher one.
    """
    ranks = nearest_ranks(configs, goal)

    def allowed(config: Config) -> bool:
        rank = config.get("rank")
        if config["method"] not in goal.methods or (rank is not None and int(rank) < goal.min_rank):
            return False
        chosen = {"method"} if rank != ranks.get(config.text("method")) else {"method", "rank"}
        return all(_TECHNIQUE_OF[name].effect(config, goal) <= goal.allow for name in config if name not in chosen)

    return allowed


def narrow(
    space: Space, goal: Goal, job: Job, *, cannot: Callable[[Config, Job], str | None] = unsupported
) -> Narrowed:
    """The configs of `space` that the goal allows and that can work for `job`; `cannot` says why one cannot. Raises
    `UsageError`, giving the most frequent reason, if none is left."""
    kept: dict[Config, None] = {}
    reasons: Counter[str] = Counter()
    beyond = 0
    whole = space.with_ranks_from(goal.min_rank)
    if job.workload.lengths is not None and goal.allow is Effect.TRAINING:
        whole = whole.with_all_of(Batching.axis)
    listed_by_space = whole.configs(AXES, batch=job.workload.batch_per_device)
    every = list(dict.fromkeys(_one_name(config, job) for config in listed_by_space))
    allowed = within(goal, every)
    for listed in every:
        config = _for_job(listed, job)
        if config in kept:
            continue
        if not allowed(listed):
            beyond += 1
            continue
        # If the format that this hardware offers instead exceeds the goal, judge the listed one, which it lacks.
        reason = cannot(config if config is listed or allowed(config) else listed, job)
        if reason is not None:
            reasons[reason] += 1
            continue
        kept[config] = None
    if not kept:
        why = reasons.most_common(1)[0][0] if reasons else "the goal allows none of them"
        raise UsageError(f"space {space.name} has no config for this search: {why}")
    lattice = Lattice(axes=AXES, configs=tuple(kept), holds=holds(job))
    return Narrowed(lattice=lattice, unsupported=dict(reasons), beyond_goal=beyond)


def _one_name(config: Config, job: Job) -> Config:
    """The config under the one name of its program: a chunked loss whose tokens all fit one chunk is the full loss."""
    is_full = config["loss"] == "chunked" and chunks_are_one(config, job)
    return config.replace(loss="full") if is_full else config


def _for_job(config: Config, job: Job) -> Config:
    """The config with what this model, hardware and trainer have in place of what they lack."""
    trainer = trainer_by_name(job.workload.trainer)
    for axis, value in trainer.usual.items():
        if config[axis] == _TECHNIQUE_OF[axis].axis.recipe:
            config = config.replace(**{axis: value})
    for axis, values in trainer.nearest.items():
        if config[axis] in values and not unsupported(replaced := config.replace(**{axis: values[config[axis]]}), job):
            config = replaced
    if config["attention"] == "sdpa" and not shape(job.model).sdpa:
        config = config.replace(attention="eager")
    if config["precision"] == "bf16-mixed":
        config = config.replace(precision=mixed_precision(job.hardware))
    if (
        config["attention"] == "sdpa"
        and keeps_scores(config, job)
        and not unsupported(repeated := config.replace(attention="efficient"), job)
    ):
        config = repeated
    if job.workload.devices == 1 and config["sharding"] != "none":
        config = config.replace(sharding="none")
    return config


@lru_cache(maxsize=100)  # counting takes half a second
def space_summaries(global_batch: int) -> list[dict[str, object]]:
    """The `summary` of every built-in space; not to be altered."""
    return [summary(load_space(name), global_batch) for name in spaces.names()]


def summary(space: Space, global_batch: int) -> dict[str, object]:
    """A space's name, purpose, least number of devices, and valid configs on so many. Raises `UsageError`."""
    check_count("global-batch", global_batch)
    shardings = space.axes.get("sharding") or (space.defaults.get("sharding", "none"),)
    devices = 1 if "none" in shardings else 2
    share, rest = divmod(global_batch, devices)
    configs = 0 if rest else space.count(AXES, batch=share)
    return {"name": space.name, "purpose": space.purpose, "devices": devices, "configs": configs}
