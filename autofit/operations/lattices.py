"""From a search space and a goal to the lattice that a search may walk."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from autofit import space as spaces
from autofit.catalog.models import shape
from autofit.errors import UsageError
from autofit.hardware import Hardware
from autofit.lattice import Config, Lattice
from autofit.space import Space
from autofit.techniques import AXES, Job, unsupported
from autofit.workload import Effect, Goal, digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowed:
    """A lattice with what was left out on the way to it."""

    lattice: Lattice
    unsupported: dict[str, int]
    """Reason -> configs of the space that cannot work here for it."""
    beyond_goal: int
    """Configs that would change more than the user allows."""

    @property
    def digest(self) -> str:
        """Equal for equal lattices."""
        return digest([c.key for c in self.lattice.configs])


def default_space(hardware: Hardware) -> str:
    """The space that is searched where none is named."""
    return "cpu" if hardware.kind == "cpu" else "single-gpu"


def load_space(name: str) -> Space:
    """A built-in space by name, or a file."""
    return spaces.load(name, AXES)


def within(config: Config, goal: Goal) -> bool:
    """Whether a config stays within the user's training goal; the same for all configs of a family.

    The method is the user's: that it changes the training is what was asked for.
    """
    rank = config.get("rank")
    return (
        config["method"] in goal.methods
        and (rank is None or int(rank) >= goal.min_rank)
        and all(a.effect(config[a.name]) <= goal.allow for a in AXES if a.name in config and a.name != "method")
    )


def narrow(space: Space, goal: Goal, job: Job) -> Narrowed:
    """The configs of `space` that the goal allows and that can work for `job`.

    Raises `UsageError` if none is left, with the most frequent reason.
    """
    kept: dict[Config, None] = {}
    reasons: Counter[str] = Counter()
    beyond = 0
    every = list(space.configs(AXES, batch=job.workload.batch_per_device))
    lowest = min((int(c["rank"]) for c in every if "rank" in c), default=0)
    for listed in every:
        floored = _at_floor(listed, goal, lowest)
        if floored is None:
            beyond += 1
            continue
        config = _with_attention(floored, job)
        if config in kept:
            continue
        if not within(config, goal):
            beyond += 1
            continue
        reason = unsupported(config, job)
        if reason is not None:
            reasons[reason] += 1
            continue
        kept[config] = None
    if not kept:
        why = reasons.most_common(1)[0][0] if reasons else "the goal allows none of them"
        raise UsageError(f"space {space.name} has no config for this search: {why}")
    return Narrowed(lattice=Lattice(axes=AXES, configs=tuple(kept)), unsupported=dict(reasons), beyond_goal=beyond)


def _with_attention(config: Config, job: Job) -> Config:
    """With eager attention where the architecture has no fused one: a space cannot know which model it is used for."""
    if config["attention"] == "sdpa" and not shape(job.model).sdpa:
        return config.replace(attention="eager")
    return config


def _at_floor(config: Config, goal: Goal, lowest: int) -> Config | None:
    """With its rank no lower than the user's floor. None for a rank above the space's `lowest` where the training may
    not change: higher ranks only cost memory and time."""
    rank = config.get("rank")
    if rank is None:
        return config
    if goal.allow < Effect.TRAINING and int(rank) != lowest:
        return None
    return config.replace(rank=max(int(rank), goal.min_rank))


def space_summaries(global_batch: int) -> list[dict[str, object]]:
    """Every built-in space: its name, purpose, and number of valid configs on the hardware it is meant for."""
    return [
        {"name": s.name, "purpose": s.purpose, "configs": s.count(AXES, batch=global_batch, valid=lambda config: True)}
        for s in (load_space(name) for name in spaces.names())
    ]
