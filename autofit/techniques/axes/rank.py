"""Rank of the adapters."""

from __future__ import annotations

from collections.abc import Iterable

from autofit.core.lattice import Axis, Config, Value
from autofit.core.workload import Effect, Goal
from autofit.techniques.technique import Technique


class Rank(Technique):
    """Inner dimension of an adapter's matrices. The user sets the minimum; higher ranks only cost memory and time."""

    axis = Axis(
        name="rank",
        values=(),
        recipe=8,
        does="The inner dimension of the adapters. A search stays at --min-rank unless --allow is training.",
        where="with method=lora or method=qlora",
    )

    def plain(self, goal: Goal) -> Value:
        return goal.min_rank

    def effect(self, config: Config, goal: Goal) -> Effect:
        return Effect.EXACT if config["rank"] == self.plain(goal) else Effect.TRAINING

    def applies(self, config: Config) -> bool:
        return config["method"] != "full"


def nearest(configs: Iterable[Config], goal: Goal) -> dict[str, int]:
    """For each method, the lowest rank among `configs` that `goal` accepts.

    A space or a store need not contain the exact rank that was asked for; this is the nearest to it.
    """
    ranks: dict[str, int] = {}
    for config in configs:
        rank = config.get("rank")
        if rank is not None and int(rank) >= goal.min_rank:
            method = config.text("method")
            ranks[method] = min(int(rank), ranks.get(method, int(rank)))
    return ranks
